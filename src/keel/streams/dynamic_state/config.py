"""Configuration of a dynamic state path, and which reading of the text is taken where it disagrees with itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keel.errors import KeelError, build_config, suggest
from keel.streams.dynamic_state.governor import SafeguardConfig

_CHOICES = {
    "tpc_input": ("hidden_state_residual", "hidden_state"),
    "noise": ("residual_norm", "hidden"),
    "continuity": ("trajectory", "magnitude"),
    "substrate": ("exponential", "sigmoid"),
    "update": ("directional", "broadcast"),
    "init": ("identity", "paper"),
}


@dataclass(frozen=True, kw_only=True)
class DynamicStateConfig:
    """Configuration of a dynamic state path. The first of each choice is the default, the second the text's other reading.

    Attributes:
        state_size: channels of the state s and of the temporal state TPC.
        retention: alpha of §6.5, in [0, 1): the share of the state that is kept at a token.
        tpc_input: what the temporal core reads: [h, s, r] (§2.2) or [h, s] (§10.3).
        noise: N from the norm of the residual stream (§4.3) or from the hidden state (§10.5).
        noise_floor: n_min > 0, added to N; §10.5 has 1e-6. It bounds the state: ‖s‖ <= 1 / n_min, √state_size times that
            with ``update="broadcast"`` (§9E.2).
        turbulence: features of turbulence (``keel.streams.dynamic_state.turbulence``) that N and I read as well; 0 for the text's
            readings alone.
        continuity: T from the angle between one TPC and the next (§2.5) or from the magnitude of the TPC (§10.9).
        substrate: S = exp(-softplus(w·v)) (§7.4, made safe) or sigmoid(w·v) (§10.8). The two are one function: w changes sign.
        update: x along the direction of the TPC, or the same x in every channel (§10.7), where the state keeps one number only.
        safeguards: thresholds of §12, also as a mapping; None for none. They act outside training alone, where §9's losses do.
        init: ``identity`` has a gate a channel that starts at zero, so attaching changes nothing; ``paper`` has no gate (§8.3).
    """

    state_size: int = 64
    retention: float = 0.9
    tpc_input: Literal["hidden_state_residual", "hidden_state"] = "hidden_state_residual"
    noise: Literal["residual_norm", "hidden"] = "residual_norm"
    noise_floor: float = 0.1
    turbulence: int = 0
    continuity: Literal["trajectory", "magnitude"] = "trajectory"
    substrate: Literal["exponential", "sigmoid"] = "exponential"
    update: Literal["directional", "broadcast"] = "directional"
    safeguards: SafeguardConfig | Mapping[str, Any] | None = None
    init: Literal["identity", "paper"] = "identity"

    def __post_init__(self) -> None:
        if isinstance(self.safeguards, Mapping):
            limits: Any = build_config(SafeguardConfig, self.safeguards, "dynamic state stream: safeguards")
            object.__setattr__(self, "safeguards", limits)
        for name, choices in _CHOICES.items():
            given = getattr(self, name)
            if given not in choices:
                raise KeelError(f"dynamic state stream: {name}={given!r}; {suggest(str(given), choices)}")
        if self.state_size < 1:
            raise KeelError(f"dynamic state stream: state_size={self.state_size}; give at least 1")
        if not 0 <= self.retention < 1:
            raise KeelError(
                f"dynamic state stream: retention={self.retention}; give a share of at least 0 and below 1 (§6.2)"
            )
        if self.turbulence < 0:
            raise KeelError(
                f"dynamic state stream: turbulence={self.turbulence}; give a number of features, 0 for none"
            )
        if self.noise_floor <= 0:
            raise KeelError(
                f"dynamic state stream: noise_floor={self.noise_floor}; the update divides by N, give a value above 0"
            )

    @property
    def limits(self) -> SafeguardConfig:
        """The thresholds, where there are safeguards."""
        assert isinstance(self.safeguards, SafeguardConfig)
        return self.safeguards
