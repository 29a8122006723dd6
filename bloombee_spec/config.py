"""Client configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

MODES = ("auto", "ring", "relay", "off")
LOSSY = ("never", "slow-links")
PLANS = ("auto", "stream", "tree", "none")
MOVING = ("auto", "rows", "kv", "none")
QUALITIES = ("exact", "int8", "fine", "coarse")
RULES = ("keyed", "leviathan", "block", "specinfer", "picospec")


@dataclass(frozen=True)
class SpecConfig:
    """How the drop-in class decodes. Every field has a default that works; see `docs/` for the reasoning."""

    drafter: Any = "suffix"
    """A drafter's name (`"suffix"`, `"none"`, `"model:PATH"`, an entry point), a `Drafter`, or a function that makes
    one per stream."""
    mode: str = "auto"
    """`ring`: servers with the plugin only. `relay`: through the host's own sessions. `auto`: ring where the swarm
    allows it, else relay.
    `off`: the host's own decoding."""
    speculate: bool = True
    """False: plain decoding through the ring, one token per lap."""
    max_candidates: int = 64
    """Live candidates per stream: in flight, or waiting for a verdict."""
    burst: int = 16
    """Candidates that are drafted and sent in one go."""
    max_depth: int = 64
    """Longest chain of candidates below the last committed token."""
    plan: str = "auto"
    """What the planner may choose from measured links, compute and acceptance: `auto` anything, `stream` candidates
    that
    follow each other without waiting, `tree` one synchronous tree per lap; both of the latter or nothing. `none`: no
    planner."""
    min_probability: float | None = None
    """A candidate whose path is less likely than this is not sent. None: what one more row costs on this route
    (measured compute and bytes)
    over what a hit saves (a lap)."""
    seed: int | None = None
    """Key of the sampling noise; None draws a new one from torch's default generator for each call."""
    rule: str = "keyed"
    """How drafts are accepted: `keyed`, or one of the rules that `docs/sampling.md` compares with it: `leviathan`,
    `block`, `specinfer` (a tree), `picospec` (not exact). Those decode in rounds of at most `burst` candidates, drawn
    from the drafter's distribution, one round per lap."""
    hedges: int = 8
    """Outcomes, other than the expected one, for which a slow drafter prepares an answer in its idle time. 0: none."""
    strict: bool = False
    """Raise instead of falling back to the host's own path when the plugin cannot serve a call."""
    client_verifies: bool = False
    """Verify at the client even if the last stage has the LM head."""
    direct_commits: bool = True
    """The last stage tells all others itself what was committed. False: by way of the client, which takes longer; for
    comparison."""
    client_embeds: bool = False
    """Send embeddings even if the first stage has the embedding table."""
    codec: str = "auto"
    """Activation codec between stages. `auto`: `raw` or `lossless`, link by link, whichever is faster as measured.
    A name: that one on all links, lossy or not."""
    lossy: str = "never"
    """With `codec="auto"`: `slow-links` lets links that earlier sessions measured below 20 Mbit/s carry `int8`. The
    text is then that of plain decoding with the same codecs (`last_stats.codecs`), not quite the swarm's own."""
    resume: bool = True
    """After a failure go on with what the other stages hold, and let a new one get its rows from its neighbour.
    Otherwise everything is computed again."""
    standby: bool = False
    """Keep a second server ready for each stage, where there is one, so that a failure costs no computing. It holds
    cache memory there, and a little bandwidth."""
    moving: str = "auto"
    """What another server is prepared with when one announces to leave: `rows` of the stage before it, its `kv`,
    `auto` whichever is there sooner, or `none`."""
    churn_quality: str = "exact"
    """Worst level, see `docs/kv.md`, at which KV may move to another server when it could not be there in time
    otherwise: `exact` keeps the text what it is; with `int8`, `fine` or `coarse` it may differ from then on
    (`last_stats.inexact`)."""
    connect_timeout: float = 20.0
    """Seconds to open a session at all stages."""
    stall_timeout: float = 60.0
    """Longest silence of the ring, in seconds, before it counts as broken."""
    max_retries: int = 3
    """Times that a broken ring is rebuilt at the last committed token, or that blocks whose servers are missing for
    the moment are looked for again, before the error is raised."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}, expected one of {', '.join(MODES)}")
        if self.lossy not in LOSSY:
            raise ValueError(f"lossy is {self.lossy!r}, expected one of {', '.join(LOSSY)}")
        if self.moving not in MOVING:
            raise ValueError(f"moving is {self.moving!r}, expected one of {', '.join(MOVING)}")
        if self.churn_quality not in QUALITIES:
            raise ValueError(f"churn_quality is {self.churn_quality!r}, expected one of {', '.join(QUALITIES)}")
        if self.plan not in PLANS:
            raise ValueError(f"plan is {self.plan!r}, expected one of {', '.join(PLANS)}")
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}, expected one of {', '.join(RULES)}")
        if self.rule != "keyed":
            self._check_rounds()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
                raise ValueError(f"{field.name} is {value}, expected no less than 0")
        if self.burst < 1 or self.max_candidates < 1:
            raise ValueError("burst and max_candidates are at least 1; use speculate=False to decode plainly")

    def _check_rounds(self) -> None:
        if self.mode not in ("auto", "ring"):
            raise ValueError(f"the rule {self.rule} needs servers with the plugin, mode is {self.mode!r}")
        if self.client_verifies:
            raise ValueError(
                f"with the rule {self.rule} the last stage and the client decide together: it does not go "
                "with client_verifies"
            )
        if self.plan == "stream":
            raise ValueError(f"the rule {self.rule} waits for each verdict: it does not go with plan='stream'")
