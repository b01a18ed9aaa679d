"""Channel-gated networks for mmsegmentation: a thin adapter over `timm_gated`."""
from timm_gated.version import __version__ as __version__

__all__: list[str] = []
