"""The console script: whatever happens ends in one sentence on stderr and a documented exit code."""

from __future__ import annotations

import io
import sys

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main() -> None:
    """Runs the command line. A PrismError is the run's own verdict: its sentence, its exit code."""
    for stream in (sys.stdout, sys.stderr):  # file names need not be UTF-8, terminals need not show all of it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # The commands are imported here, so that a Ctrl-C meanwhile ends like any other.
        from prism_fast.cli.app import app
        from prism_fast.protocol.errors import EXIT_ENGINE, PrismError

        try:
            app()
        except PrismError as error:
            rule = f" [{error.rule}]" if error.rule else ""
            print(f"prism-fast: {error}{rule}", file=sys.stderr)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(EXIT_ENGINE)
        except OSError as error:  # a full disk, a directory that cannot be written to
            print(f"prism-fast: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
            sys.exit(EXIT_ENGINE)
        except SystemExit as error:  # typer's answer to Ctrl-C has a code and no words
            if error.code == INTERRUPTED:
                raise KeyboardInterrupt from None
            raise
    except KeyboardInterrupt:
        print("prism-fast: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
