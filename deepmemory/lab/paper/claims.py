"""The statements of the paper about its figures and tables, each with the rule that decides it."""

from __future__ import annotations

from dataclasses import dataclass

from deepmemory.lab.paper.recipes import DEPTHS, DMU_C, UNITS


@dataclass(frozen=True)
class Claim:
    """A statement about a figure; ``deepmemory.lab.report.results`` checks it against records."""

    text: str  # in few words
    check: str  # name of the rule that decides
    cells: tuple[str, ...]  # that it is about, in the order the rule expects
    thresholds: tuple[float, ...] = ()  # that it is about; none means all


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "adding": (
        Claim("DMU significantly outperforms all other modules", "ahead", ("dmu", "gru", "lstm", "rnn", "rhn")),
        Claim("GRU scores better than LSTM", "ahead", ("gru", "lstm")),
        Claim("RNN reaches no threshold", "never", ("rnn",)),
        Claim("RHN reaches no threshold", "never", ("rhn",)),
    ),
    "temporal-order": (
        Claim("DMU converges faster than GRU", "faster", ("dmu", "gru"), (1e-2, 1e-3, 1e-4)),
        Claim("DMU and GRU are similar down to 1e-4", "similar", ("dmu", "gru"), (1e-2, 1e-3, 1e-4)),
        Claim("DMU outperforms GRU at lower thresholds", "more", ("dmu", "gru"), (1e-5, 1e-6)),
        Claim("LSTM has partial success at higher thresholds", "partly", ("lstm",), (1e-2,)),
        Claim("LSTM fails at lower thresholds", "never", ("lstm",), (1e-5, 1e-6)),
        Claim("RNN reaches no threshold", "never", ("rnn",)),
        Claim("RHN reaches no threshold", "never", ("rhn",)),
    ),
    "noisy-sequence": (
        Claim("GRU reaches all thresholds in most cases", "mostly", ("gru",)),
        Claim("DMU reaches all thresholds in most cases", "mostly", ("dmu",)),
        Claim("GRU trains faster than DMU", "faster", ("gru", "dmu")),
        Claim("RHN reaches all thresholds in about half of the cases, else none", "half", ("rhn",)),
        Claim("RNN performs worse than RHN", "ahead", ("rhn", "rnn")),
        Claim("LSTM performs worse than RNN", "ahead", ("rnn", "lstm")),
    ),
}


@dataclass(frozen=True)
class TableClaim:
    """A statement about tables; ``deepmemory.lab.report.results`` checks it against them and against records."""

    text: str  # in few words
    check: str  # name of the rule that decides
    tables: tuple[str, ...]
    cells: tuple[str, ...] = ("dmu", "rhn")  # in the order the rule expects
    sizes: tuple[int, ...] = DEPTHS  # depths, or units in the table of pixels
    parts: tuple[str, ...] = ()  # languages or orders of pixels; none means all
    note: str = ""  # such as where the paper's text and table disagree


DEPTH_2 = "In the paper's table it is at depth 2 that the RHN is ahead, for all three pairs, and nowhere else."

TABLE_CLAIMS: tuple[TableClaim, ...] = (
    TableClaim("DMU outperforms RHN at 3 of 4 depths in mean test loss", "most", ("polymusic",)),
    TableClaim("DMU is better than RHN at depths 1, 5 and 10", "better", ("natlang",), sizes=(1, 5, 10)),
    TableClaim("RHN is slightly better than DMU at depth 2", "slightly", ("natlang",), ("rhn", "dmu"), (2,)),
    TableClaim(
        "DMU is better than RHN at every depth for Spanish and German",
        "better",
        ("translation",),
        parts=("spanish", "german"),
        note=DEPTH_2,
    ),
    TableClaim(
        "DMU is better than RHN at every depth but 1 for Portuguese",
        "better",
        ("translation",),
        sizes=(2, 5, 10),
        parts=("portuguese",),
        note=DEPTH_2,
    ),
    TableClaim("Both networks are best at depth 1 or 2", "shallow", ("translation",)),
    TableClaim("Greater depth makes both networks worse", "worsens", ("translation",)),
    TableClaim("Depth costs the RHN more than the DMU", "steeper", ("translation",), ("rhn", "dmu")),
    TableClaim("DMU outperforms RHN in 15 of 20 mean test scores", "most", ("polymusic", "natlang", "translation")),
    TableClaim("DMU stays competitive in the other five", "competitive", ("polymusic", "natlang", "translation")),
    TableClaim("Depth did not yield better results", "shallow", ("polymusic", "natlang", "translation")),
    TableClaim(
        "Reducing the module's learning rate helps in music",
        "better",
        ("polymusic_lr_ablation",),
        ("dmu", DMU_C),
        note="The text makes no exception; in the paper's table it helps at depths 5 and 10 alone.",
    ),
    TableClaim(
        "It helps in music at depths 5 and 10", "better", ("polymusic_lr_ablation",), ("dmu", DMU_C), sizes=(5, 10)
    ),
    TableClaim(
        "Reducing the module's learning rate helps in language", "better", ("natlang_lr_ablation",), ("dmu", DMU_C)
    ),
    TableClaim(
        "Reducing the module's learning rate helps in translation",
        "better",
        ("translation_lr_ablation",),
        ("dmu", DMU_C),
    ),
    TableClaim("DMU classifies 98.5 to 98.7 % in order", "reaches", ("pixel_mnist",), ("dmu",), UNITS, ("ordered",)),
    TableClaim("DMU classifies 93.4 % when permuted", "reaches", ("pixel_mnist",), ("dmu",), UNITS, ("permuted",)),
)
