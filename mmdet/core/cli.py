"""What the command lines share: exit codes, one-line usage errors, the exp from the arguments."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from mmdet.core.failure import RankError, announce, stop_watch
from mmdet.core.launch import strip_local_rank
from mmdet.core.logger import describe_error, setup_logging
from mmdet.errors import UsageError, UserError
from mmdet.exp import Exp, get_exp
from mmdet.exp.fields import nearest
from mmdet.exp.load import shipped_names


class Parser(argparse.ArgumentParser):
    """Usage errors are one line and exit code 2."""

    def error(self, message: str) -> None:
        flags = [flag for action in self._actions for flag in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        hint = nearest(unknown, flags) if unknown.startswith("-") else ""
        raise UsageError(f"{message}{hint and f'.{hint}'} (see {self.prog} --help)")


def run_command(main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 0, 2 for what the user can mend, 3 for non-finite training, 1 for the
    rest, 130 for Ctrl-C. The error is the last line."""
    words = list(sys.argv[1:] if argv is None else argv)
    setup_logging(int(os.environ.get("RANK", 0)))
    try:
        return main(strip_local_rank(words)) or 0
    except UserError as error:
        if not getattr(error, "reported", False) and announce(error):  # of several processes one says it
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt as error:
        if not getattr(error, "reported", False):
            print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except RankError as error:
        announce(error)  # waits until that rank has told it
        return error.exit_code
    except Exception as error:
        if not getattr(error, "reported", False) and announce(error):
            traceback.print_exc()
            print(f"error: {describe_error(error)}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        stop_watch()


def add_exp_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--exp_file", default="", help="exp file: exps/NAME.py, or your own")
    parser.add_argument("-n", "--name", default="", help="name of a shipped exp")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the exp, e.g. max_epoch=10")


def exp_source(args: argparse.Namespace) -> str:
    """The exp file or name that was asked for; empty if none."""
    if args.exp_file and args.name:
        raise UsageError("-f and -n both name an exp: give one of them")
    return args.exp_file or args.name


def exp_from_arguments(args: argparse.Namespace) -> Exp:
    source = exp_source(args)
    if not source:
        raise UsageError(f"no exp given: use -f exps/NAME.py (a file) or -n NAME (a shipped one: {', '.join(shipped_names())})")
    return get_exp(source)
