"""An experiment-class object-detection trainer."""

import os as _os
from importlib import metadata as _metadata

# Idle OpenMP threads sleep instead of spinning: with two compute threads beside one other busy process on two cores, spinning
# made a step 5 times slower (measured, 2026-11-30). Read when torch is loaded; a value that the user set stays.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"


def _refuse_namesake() -> None:
    """Another project's distribution also installs an import package called ``mmdet``; two in one environment mix files."""
    try:
        version = _metadata.version("mmdet")
    except _metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"OpenMMLab's distribution 'mmdet' {version} is installed in this environment, and it uses the same import name as "
        "'mmdet-exp' (this package). Use an environment of its own for each, or run `pip uninstall mmdet` and then "
        "`pip install --force-reinstall --no-deps mmdet-exp` (or `-e .` in a checkout)."
    )


_refuse_namesake()
