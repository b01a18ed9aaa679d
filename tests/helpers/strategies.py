"""Hypothesis strategies: priors, networks, gate masks, image sizes"""
from typing import Any, Dict

import timm
import torch
import torch.nn as nn
from effort import TIMES
from hypothesis import settings
from hypothesis import strategies as st
from nets import is_bottleneck, is_imagenet, shuffle

from timm_gated import gates
from timm_gated.layers.narrow import gated_channels, inner_channels, narrow_maps
from timm_gated.loss.priors import Beta, Mixture, Normal, Prior, RelaxedBernoulli, Uniform

seeds = st.integers(0, 10**6)


def examples(count: int) -> settings:
    """Set the number of examples, which EXAMPLES_TIMES in the environment multiplies. Runs are deterministic."""
    return settings(max_examples=count * TIMES, deadline=None)


def _shapes(least: float) -> st.SearchStrategy[float]:
    return st.floats(least, 5)


def simple_priors(least: float = 0.1) -> st.SearchStrategy[Prior]:
    """Priors of every family with parameters of at least `least`. Small parameters put the mass at the ends."""
    first, second = _shapes(least), _shapes(least)
    return st.one_of(
        st.builds(Beta, first, second),
        st.builds(lambda low, high: Uniform(0.5 - low, 0.5 + high), first, second),
        st.builds(Normal, first, second),
        st.builds(RelaxedBernoulli, first, second.map(lambda odds: odds / (1 + odds))))


def priors(least: float = 0.1) -> st.SearchStrategy[Prior]:
    simple = simple_priors(least)
    return simple | st.builds(Mixture, simple, simple, st.floats(0, 1))


def quantiles(prior: Prior, p: torch.Tensor) -> torch.Tensor:
    """Invert the CDF of a prior by bisection, to full precision."""
    low, high = torch.full_like(p, -100), torch.full_like(p, 100)
    for _ in range(180):
        middle = (low + high) / 2
        below = prior.cdf(middle) < p
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


def decisions(*shape: int) -> st.SearchStrategy[torch.Tensor]:
    """Masks of 0s and 1s, including all 0s and all 1s."""

    def draw(share: float, seed: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share).float()

    return st.builds(draw, st.sampled_from([0., 0.05, 0.3, 0.6, 0.95, 1.]), seeds)


@st.composite
def forced_masks(draw, model: nn.Module) -> Dict[str, torch.Tensor]:
    """Masks for all, some or no gates of a model, the same for all images."""
    named = gates(model)
    chosen = draw(st.sampled_from([[], named, named[::2]]))
    return {name: draw(decisions(gate.num_gates)) for name, gate in chosen}


def sizes(largest: int = 70) -> st.SearchStrategy:
    """Heights and widths, including odd ones, single pixels and single rows."""
    side = st.integers(1, largest)
    return st.sampled_from([(1, 1), (33, 65), (1, 37), (32, 32)]) | st.tuples(side, side)


def in_channels(model: nn.Module) -> int:
    return next(module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d))


@st.composite
def images(draw, channels: int = 3, most: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(seeds))
    x = torch.randn(draw(st.integers(1, most)), channels, *draw(sizes()), generator=generator)
    return x * torch.rand(len(x), 1, 1, 1, generator=generator).mul(3).exp()  # so that decisions differ


@st.composite
def networks(draw, names: list) -> nn.Module:
    """Networks of random widths, depths, stems, strides and gates, some narrowed like pruned ones."""
    name = draw(st.sampled_from(names))
    num_stages = 4 if is_imagenet(name) else 3
    kwargs: Dict[str, Any] = dict(
        layers=tuple(draw(st.integers(1, 2)) for _ in range(num_stages)),
        channels=tuple(sorted(draw(st.integers(1, 40)) for _ in range(num_stages))),
        in_chans=draw(st.integers(1, 4)))
    if is_imagenet(name):
        kwargs.update(
            replace_stem_pool=draw(st.booleans()),
            **draw(st.sampled_from([{}, dict(stem_type='deep', stem_width=8)])),
            # avg_down with dilation is not supported
            **draw(st.sampled_from([{}, dict(avg_down=True), dict(output_stride=8), dict(output_stride=16)])))
    else:
        kwargs.update(output_stride=draw(st.sampled_from([1, 2, 4])))
    if name.startswith('gated_') and is_bottleneck(name):
        kwargs.update(gated_maps=draw(st.sampled_from([(1,), (2,), (1, 2)])))
    if draw(st.booleans()):
        kwargs.update(features_only=True)
    else:
        kwargs.update(num_classes=draw(st.sampled_from([0, 1, 10])))
    seed = draw(seeds)
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs)
    if name.startswith('gated_') and draw(st.booleans()):
        inner = {block: [draw(st.integers(1, n)) for n in widths] for block, widths in inner_channels(model).items()}
        gated = {block: [draw(st.integers(0, min(n, width))) for n, width in zip(widths, inner[block], strict=True)]
                 for block, widths in gated_channels(model).items()}
        narrow_maps(model, inner, gated)
    return shuffle(model, seed).eval()
