"""Gates against depth: known gates give known correlations, padding changes nothing, saturation by hand.

Shapes: T tokens, S sites.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import keel
from keel.errors import KeelError
from keel.probes import gate_depth, run_gates
from keel.probes.gates import mean_interval, pearson, reference_pearson

OPEN, CLOSE = 1, 2


def model(seed: int = 0) -> keel.KeelForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3,
    )  # fmt: skip
    return keel.attach(LlamaForCausalLM(config).eval(), keel.StructuralStream(init="paper"))


def brackets(count: int = 6) -> tuple[list[Tensor], list[Tensor]]:
    """Random balanced words of several lengths, and the depth after each bracket."""
    generator = torch.Generator().manual_seed(5)
    words, depths = [], []
    for index in range(count):
        half, word, depth, open_left = 4 + index % 3, [], 0, 4 + index % 3
        while len(word) < 2 * half:
            opens = depth == 0 or (open_left > 0 and torch.rand((), generator=generator) < 0.5)
            word.append(OPEN if opens else CLOSE)
            open_left, depth = (open_left - 1, depth + 1) if opens else (open_left, depth - 1)
        ids = torch.tensor(word)
        words.append(ids)
        depths.append(torch.where(ids == OPEN, 1, -1).cumsum(0))
    return words, depths


def fixed_gates(found: keel.KeelForCausalLM, values: Tensor) -> None:
    """Make the gate of site s at every token ``values[s]``."""
    stream = found.streams["structural"]
    with torch.no_grad():
        stream.gate_state.zero_()
        stream.gate_hidden.zero_()
        stream.gate_bias.copy_(torch.logit(values)[:, None])


def test_correlations_equal_the_twin_for_every_sequence_and_site() -> None:
    words, depths = brackets()
    found, whole = model(), gate_depth(model(), words, depths, batch_size=6)
    split = gate_depth(found, words, depths, batch_size=1)
    assert [row.site for row in whole.rows][:3] == ["mean", "attention_norm_input@layer0", "mlp_norm_input@layer0"]
    gates = []
    for word in words:
        with torch.no_grad():
            gate_TS = found(word[None], collect_signals=True).signals["structural.gate"][0].double()
        gates.append(torch.cat([gate_TS.mean(1, keepdim=True), gate_TS], 1))
    for index, (row, other) in enumerate(zip(whole.rows, split.rows, strict=True)):
        expected = [
            reference_pearson(gate[:, index].tolist(), depth.tolist())
            for gate, depth in zip(gates, depths, strict=True)
        ]
        assert row.r == pytest.approx(expected, abs=1e-4) and other.r == pytest.approx(expected, abs=1e-4)
        assert row.mean_r == pytest.approx(sum(expected) / len(expected), abs=1e-4)
        every = torch.cat([gate[:, index] for gate in gates]).tolist()
        assert row.pooled_r == pytest.approx(reference_pearson(every, torch.cat(depths).tolist()), abs=1e-4)
        assert row.ci95 is not None and row.ci95[0] <= row.mean_r <= row.ci95[1]
    assert len({round(row.mean_r, 6) for row in whole.rows}) == len(whole.rows)  # sites differ: no mix-up could pass


def test_a_gate_that_follows_depth_is_found_and_one_against_it() -> None:
    """Depth is put where the signal is read, so the whole way to the numbers is walked with a known answer."""
    words, depths = brackets()
    found = model()
    stream = found.streams["structural"]
    close = type(stream).close

    def with_depth(flow):  # type: ignore[no-untyped-def]
        result = close(stream, flow)
        depth_BT = torch.where(flow.inputs.input_ids_BT == OPEN, 1.0, -1.0).cumsum(1)
        gate_BTS = torch.stack([depth_BT / 10, 1 - depth_BT / 10, torch.full_like(depth_BT, 0.5), depth_BT / 10], -1)
        return type(result)(state=result.state, signals={"gate": gate_BTS})

    stream.close = with_depth
    rows = gate_depth(found, words, depths).rows
    assert [row.mean_r for row in rows[1:3]] == pytest.approx([1, -1], abs=1e-6)
    assert math.isnan(rows[3].mean_r) and rows[3].undefined == len(words) and rows[3].ci95 is None
    assert rows[0].pooled_r == pytest.approx(1, abs=1e-6) and rows[0].pooled_p < 1e-7


def test_saturation_counts_gates_near_zero_and_one() -> None:
    words, depths = brackets()
    found = model()
    fixed_gates(found, torch.tensor([0.01, 0.5, 0.99, 0.06]))
    rows = {row.site: row for row in gate_depth(found, words, depths).rows}
    shares = {site: (row.low_share, row.high_share) for site, row in rows.items()}
    assert shares == {
        "mean": (0, 0),
        "attention_norm_input@layer0": (1, 0),
        "mlp_norm_input@layer0": (0, 0),
        "attention_norm_input@layer1": (0, 1),
        "mlp_norm_input@layer1": (0, 0),
    }
    assert "gates.low_share_attention_norm_input@layer0" in gate_depth(found, words, depths).metrics()
    assert rows["mean"].mean_gate == pytest.approx((0.01 + 0.5 + 0.99 + 0.06) / 4, abs=1e-5)


def test_pearson_by_hand_and_where_it_is_undefined() -> None:
    torch.manual_seed(0)
    first, second = torch.rand(20).double().numpy(), torch.rand(20).double().numpy()
    assert pearson(first, second)[0] == pytest.approx(reference_pearson(first.tolist(), second.tolist()))
    assert math.isnan(pearson(first, second * 0)[0]) and math.isnan(pearson(first[:2], second[:2])[0])


def test_the_interval_covers_the_mean_and_repeats() -> None:
    values = [0.1, 0.5, 0.9, math.nan, 0.7]
    low, high = mean_interval(values, seed=1)
    assert 0.1 <= low < 0.55 < high <= 0.9 and mean_interval(values, seed=1) == (low, high)
    assert mean_interval([0.3, math.nan]) is None and mean_interval([0.3, 0.3]) == (0.3, 0.3)


def test_unusable_input_is_named() -> None:
    words, depths = brackets(2)
    with pytest.raises(KeelError, match="one depth a token"):
        gate_depth(model(), words, [depths[0], depths[1][:-1]])
    with pytest.raises(KeelError, match="2 sequences and 1 depths"):
        gate_depth(model(), words, depths[:1])
    with pytest.raises(KeelError, match=r"no gate signal 'structural\.gates'; did you mean 'structural\.gate'"):
        gate_depth(model(), words, depths, signal="structural.gates")


def test_run_writes_table_and_figures(tmp_path: Path) -> None:
    words, depths = brackets()
    result = run_gates(model(), words, depths, tmp_path)
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["metrics"] == pytest.approx(result.metrics()) and table["case"]["depth"] == depths[0].tolist()
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"gates.{name}.{kind}" for name in ("case", "histogram") for kind in ("svg", "png")} < names
    assert result.table().row_count == 5
