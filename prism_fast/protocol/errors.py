"""Every way a run can end other than scored: one exception type per exit code, one sentence each.

Exit codes (also in docs/cli.md): 0 scored, 2 usage, 3 bundle rejected, 4 bundle failed, 5 our or the machine's fault
(bad data files included), 7 wall-clock watchdog, 8 artifacts quota.
"""

from __future__ import annotations

EXIT_SCORED = 0
EXIT_USAGE = 2
EXIT_BUNDLE_REJECTED = 3
EXIT_BUNDLE_FAILED = 4
EXIT_ENGINE = 5
EXIT_WATCHDOG = 7
EXIT_ARTIFACTS_QUOTA = 8


def one_line(text: str) -> str:
    """`text` fit for a terminal, a log line and JSON: no control characters, line ends or bytes that are not UTF-8."""
    if text.isprintable():
        return text
    return " ".join("".join(ch if ch.isprintable() else " " for ch in text).split())


class PrismError(Exception):
    """A run that cannot go on. `rule` names the rule broken (`prism:...`), if there is one.

    The message is one line whatever it quotes: names inside a zip and what a bundle says of itself are in it.
    """

    exit_code = EXIT_ENGINE

    def __init__(self, message: str, *, rule: str | None = None) -> None:
        super().__init__(one_line(message))
        self.rule = rule


class UsageError(PrismError, ValueError):
    """What was asked for does not exist or does not fit together."""

    exit_code = EXIT_USAGE


class BundleRejected(PrismError):
    """The bundle breaks the contract: it is not scored, and running it again would not change that."""

    exit_code = EXIT_BUNDLE_REJECTED


class BundleFailed(PrismError):
    """The bundle's own code failed while it ran."""

    exit_code = EXIT_BUNDLE_FAILED


class EngineFault(PrismError):
    """Our fault or the machine's: the bundle is not to blame."""

    exit_code = EXIT_ENGINE


class DataError(EngineFault, ValueError):
    """A data file is not what it says it is. The message names file, offset or line, expected and found."""


class BudgetExceeded(BundleFailed):
    """The bundle ran past the wall-clock watchdog."""

    exit_code = EXIT_WATCHDOG


class ArtifactsQuotaExceeded(BundleFailed):
    """The bundle wrote more artifacts than it may."""

    exit_code = EXIT_ARTIFACTS_QUOTA
