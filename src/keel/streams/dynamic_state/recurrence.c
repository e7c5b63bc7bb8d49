/* The two loops of recurrence.py over time, compiled where there is a C compiler: their products are so small that calling them from
   Python takes longer than they do. Each loop does for every token and row what the loop in Python does, in the same order; the shapes and
   the names are its own. REAL is float or double. */

#include <math.h>
#include <stddef.h>
#include <string.h>

typedef REAL real;
typedef ptrdiff_t count;

#define EPSILON ((real)1e-6)
#define ROWS 8 /* rows of a batch whose sums stay in registers */
#define COLUMNS ((count)(64 / sizeof(real)))

/* As many numbers as the widest register holds, wherever they lie; where registers are narrower the compiler takes several. */
typedef real vector __attribute__((vector_size(64), aligned(sizeof(real)), may_alias));

/* out [rows, COLUMNS] += in [rows, m] @ weight [m, COLUMNS]; a row of each begins so many numbers after the one before it. */
static inline __attribute__((always_inline)) void block(
    count rows, count m, real *restrict out, count out_step, const real *restrict in, count in_step, const real *restrict weight,
    count weight_step)
{
    vector sum[ROWS];
#pragma GCC unroll 8
    for (count b = 0; b < rows; b++) sum[b] = *(const vector *)(out + b * out_step);
    for (count i = 0; i < m; i++) {
        const vector column = *(const vector *)(weight + i * weight_step);
#pragma GCC unroll 8
        for (count b = 0; b < rows; b++) sum[b] += in[b * in_step + i] * column;
    }
#pragma GCC unroll 8
    for (count b = 0; b < rows; b++) *(vector *)(out + b * out_step) = sum[b];
}

/* out [batch, n] += in [batch, m] @ weight [m, n] */
static void add_product(
    count batch, count m, count n, real *restrict out, count out_step, const real *restrict in, count in_step,
    const real *restrict weight)
{
    const count whole = n / COLUMNS * COLUMNS;
    count b = 0;
    for (; b + ROWS <= batch; b += ROWS)
        for (count j = 0; j < whole; j += COLUMNS)
            block(ROWS, m, out + b * out_step + j, out_step, in + b * in_step, in_step, weight + j, n);
    for (; b < batch; b++)
        for (count j = 0; j < whole; j += COLUMNS)
            block(1, m, out + b * out_step + j, out_step, in + b * in_step, in_step, weight + j, n);
    for (b = 0; b < batch; b++)
        for (count i = 0; i < m; i++)
            for (count j = whole; j < n; j++) out[b * out_step + j] += in[b * in_step + i] * weight[i * n + j];
}

static inline real dot(count n, const real *restrict a, const real *restrict b)
{
    real part[64 / sizeof(real)] = {0}, sum = 0; /* as many sums as a register holds: one alone would wait for itself */
    count i = 0;
    for (; i + COLUMNS <= n; i += COLUMNS)
        for (count j = 0; j < COLUMNS; j++) part[j] += a[i + j] * b[i + j];
    for (; i < n; i++) sum += a[i] * b[i];
    for (count j = 0; j < COLUMNS; j++) sum += part[j];
    return sum;
}

/* Written so that a compiler can take many numbers at once; NaN stays NaN. The polynomials are those of the Cephes library. */
static inline real exponential(real x)
{
    if (sizeof(real) == 8) return (real)exp((double)x);
    float y = (float)x;
    y = y > 88.0f ? 88.0f : y;
    y = y < -87.0f ? -87.0f : y;
    const float power = nearbyintf(y * 1.44269504f), rest = (y - power * 0.693359375f) + power * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const int bits = ((int)power + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return (real)(sum * scale);
}

static inline real sigmoid(real x) { return 1 / (1 + exponential(-x)); }

static inline real hyperbolic_tangent(real x)
{
    if (sizeof(real) == 8) return (real)tanh((double)x);
    const float y = (float)x, square = y * y, far = 1.0f - 2.0f / ((float)exponential(2.0f * y) + 1.0f);
    float sum = -5.70498872745e-3f; /* near zero the difference above has lost its digits */
    sum = sum * square + 2.06390887954e-2f;
    sum = sum * square - 5.37397155531e-2f;
    sum = sum * square + 1.33314422036e-1f;
    sum = sum * square - 3.33332819422e-1f;
    return (real)(fabsf(y) < 0.625f ? sum * square * y + y : far);
}

/* rows [length + 1, batch, 4 size]: (p, TPC, s, query of the next token); gates [length, batch, 4 size] and before: what enters them;
   states [length, batch, 2 size]: before a reset. keep [length, batch] is NULL where no row is ever reset. */
void forward(
    count length, count batch, count size, real *restrict rows, real *restrict gates, const real *restrict offsets,
    const real *restrict factors, const real *restrict gate_weight, const real *restrict direction,
    const real *restrict coherence, const real *restrict keep, real *restrict states)
{
    const count row = 4 * size;
    for (count t = 0; t < length; t++) {
        real *now = rows + t * batch * row, *next = now + batch * row, *gate_rows = gates + t * batch * row;
        for (count b = 0; keep && b < batch; b++)
            for (count j = size; j < 3 * size; j++) now[b * row + j] *= keep[t * batch + b];
        add_product(batch, 2 * size, row, gate_rows, row, now + size, row, gate_weight);
        for (count b = 0; b < batch; b++) {
            real *gate = gate_rows + b * row, *tpc = next + b * row + size;
            const real *before = now + b * row + size;
            for (count j = size; j < 3 * size; j++) gate[j] = sigmoid(gate[j]);
            for (count j = 0; j < size; j++) gate[3 * size + j] = hyperbolic_tangent(gate[3 * size + j] + gate[size + j] * gate[j]);
            for (count j = 0; j < size; j++) tpc[j] = gate[3 * size + j] + gate[2 * size + j] * (before[j] - gate[3 * size + j]);
            memset(next + b * row, 0, size * sizeof(real));
        }
        add_product(batch, size, size, next, row, next + size, row, direction);
        for (count b = 0; b < batch; b++) {
            real *p = next + b * row, *tpc = p + size, *s = p + 2 * size, *state = states + (t * batch + b) * 2 * size;
            const real *before = now + b * row + size, *s_before = before + size, *query = before + 2 * size;
            const real *factor = factors + (t * batch + b) * 2;
            const real tpc_length = (real)sqrt((double)dot(size, tpc, tpc)) + EPSILON;
            const real before_length = (real)sqrt((double)dot(size, before, before)) + EPSILON;
            const real continuity = 1 + dot(size, tpc, before) / tpc_length / before_length;
            real alignment = dot(size, query, tpc) / tpc_length;
            alignment = alignment < 0 ? 0 : alignment > 1 ? 1 : alignment;
            const real taken = factor[0] * continuity * sigmoid(offsets[t * batch + b] + dot(size, tpc, coherence)) * alignment
                / ((real)sqrt((double)dot(size, p, p)) + EPSILON);
            const real retained = factor[1] * continuity;
            for (count j = 0; j < size; j++) s[j] = taken * p[j] + retained * s_before[j];
            memcpy(state, tpc, 2 * size * sizeof(real));
        }
    }
}

/* gates comes with the local gradients and leaves with those of the gates; grads [length, batch, 2 size] with what the states receive from
   outside and leaves with all that they receive; before [batch, 2 size] comes with zeros. */
void backward(
    count length, count batch, count size, real *restrict gates, real *restrict grads, const real *restrict jacobians,
    const real *restrict outers, const real *restrict throughs, const real *restrict takens, const real *restrict gate_weight,
    const real *restrict direction, const real *restrict keep, real *restrict numbers, real *restrict scratch,
    real *restrict before)
{
    const count pair = 2 * size;
    for (count t = length; t-- > 0;) {
        real *grad_rows = grads + t * batch * pair, *gate_rows = gates + t * batch * 4 * size;
        real *earlier = t ? grad_rows - batch * pair : before;
        for (count b = 0; b < batch; b++) {
            real *grad = grad_rows + b * pair, *number = numbers + (t * batch + b) * 2, *from_state = scratch + b * pair;
            const real *outer = outers + (t * batch + b) * pair, *jacobian = jacobians + (t * batch + b) * 4 * size;
            number[0] = dot(size, outer, grad + size);
            number[1] = dot(size, outer + size, grad + size);
            for (count j = 0; j < size; j++) grad[j] += number[0] * jacobian[j] + number[1] * jacobian[pair + j];
            for (count j = 0; j < size; j++) from_state[j] = takens[t * batch + b] * grad[size + j];
        }
        add_product(batch, size, size, grad_rows, pair, scratch, pair, direction);
        for (count b = 0; b < batch; b++) {
            real *gate = gate_rows + b * 4 * size, *inside = scratch + b * pair;
            const real *grad = grad_rows + b * pair, *through = throughs + (t * batch + b) * pair;
            const real *number = numbers + (t * batch + b) * 2, *jacobian = jacobians + (t * batch + b) * 4 * size;
            for (count k = 0; k < 4; k++)
                for (count j = 0; j < size; j++) gate[k * size + j] *= grad[j];
            for (count j = 0; j < pair; j++) inside[j] = grad[j] * through[j];
            for (count j = 0; j < size; j++) inside[j] += number[0] * jacobian[size + j] + number[1] * jacobian[pair + size + j];
        }
        add_product(batch, 4 * size, pair, scratch, pair, gate_rows, 4 * size, gate_weight);
        for (count b = 0; b < batch; b++) {
            const real kept = keep ? keep[t * batch + b] : 1;
            for (count j = 0; j < pair; j++) earlier[b * pair + j] += kept * scratch[b * pair + j];
        }
    }
}
