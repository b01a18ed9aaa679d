"""Gate a trained network

`gate` builds the gated variant of a timm ResNet by its name and recorded arguments, and copies the weights. So the
result is a model like any other of timm: it can be saved, reloaded by name and resumed.

timm records the arguments of a model, but not what is done to it afterwards. `gate` builds the dense network anew, too,
and compares it with the given one module by module. Any difference is refused, hooks included, and so are different
outputs.
"""
from typing import Any, Dict, List, Optional

import timm
import torch
import torch.nn as nn
from timm.models import FeatureGraphNet, get_model_args, is_model
from timm.models.resnet import ResNet

from ..layers import force_gates
from ..utils import evaluation_mode, explained, unwrap
from ._gated_net import GatedNet
from .gated_resnet import check_blocks

__all__ = ['gate']

_PLAIN = bool, int, float, str, tuple, type(None)
_CHANGEABLE = 'training', 'grad_checkpointing'  # state of a module that `gate` keeps
_HOOKS = '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'


def gate(model: nn.Module, budget: Optional[float] = None, **options: Any) -> Any:
    """Add gates to a trained ResNet of timm. Returns a new model; the given one is unchanged.

    All of timm's ResNets that `timm_gated.list_gated_models('gated_*')` names can be gated, with any head, image
    channels, pooling, drop rates or output stride, and as feature extractors; so can the dense networks of this
    package. Gates start open (`gate_bias=2`). The weights, their device, dtype and memory format, frozen parameters and
    the mode of each module are kept. With its gates forced open the result equals the given model.

    Without `from_dense`, the losses of batch shaping and L0 are off unless `lam` or `gamma` are given, so that only the
    budget drives the gates.

    Args:
        model: ResNet created by timm.
        budget: Target share of the model's MACs.
        **options: Options of the gated model, such as `from_dense` (the number of epochs of the fine-tuning),
            `gate_bias`, `lam`, `gamma`, `prior` or `gated_maps`.

    Examples:
        >>> model = timm.create_model('resnet50d.ra2_in1k', pretrained=True)
        >>> gated = timm_gated.gate(model, budget=0.7, from_dense=10)
    """
    network: Any = unwrap(model)
    name = _check_name(network)
    args = _arguments(network)
    blueprint = timm.create_model(network.pretrained_cfg['architecture'], device='meta', **args)
    _compare(network, blueprint)
    dtypes = {parameter.dtype for parameter in network.parameters()}
    if len(dtypes) > 1:
        raise ValueError(
            f'all parameters of a model to gate must have one dtype, got {", ".join(sorted(map(str, dtypes)))}. '
            f'Convert it with model.float(), and the gated model back.')

    defaults: Dict[str, Any] = {} if options.get('from_dense') else dict(gate_bias=2., lam=0., gamma=0.)
    cfg = {**network.pretrained_cfg, 'architecture': name}
    cfg.pop('state_dict', None)
    gated: Any = timm.create_model(name, pretrained_cfg=cfg, budget=budget, **{**args, **defaults, **options})
    gated.to(next(network.parameters()))
    dense_keys = blueprint.state_dict().keys()
    weights = {key: value for key, value in gated.state_dict().items() if key not in dense_keys}  # of the gates
    weights.update((key, value.clone()) for key, value in network.state_dict().items())
    with explained(f'the weights of this {type(network).__name__} do not fit {name}'):
        gated.load_state_dict(weights, assign=True)  # keeps the memory format
    for key, parameter in network.named_parameters():
        gated.get_parameter(key).requires_grad_(parameter.requires_grad)
    for key, module in network.named_modules():  # parents first, so that gates have the mode of their block
        gated.get_submodule(key).train(module.training)
    if getattr(network, 'grad_checkpointing', False):
        gated.set_grad_checkpointing()
    _compare_outputs(network, gated)
    return gated


def _check_name(network: Any) -> str:
    """Name of the gated variant; a ValueError if there is none."""
    if any(isinstance(module, GatedNet) for module in network.modules()):
        raise ValueError(
            f'this {type(network).__name__} is gated already. For other gates, gate the dense model, or create a gated '
            f'one by name.')
    if isinstance(network, FeatureGraphNet):
        raise ValueError("a FeatureGraphNet cannot be gated; create the model with feature_cls='list'.")
    if isinstance(network, ResNet):
        check_blocks(network)
    name = getattr(network, 'pretrained_cfg', {}).get('architecture')
    if name is None:
        raise ValueError(
            f'this {type(network).__name__} was not created by timm.create_model, so it could not be rebuilt by name. '
            f'Create a model by name and load the weights into it.')
    gated = f'gated_{name.removeprefix("slim_").removeprefix("cifar_")}'
    if not is_model(gated):
        raise ValueError(
            f"there is no gated variant of '{name}'; timm_gated.list_gated_models('gated_*') lists those that there "
            f'are. Gate blocks of your own as in examples/own_block.py.')
    return gated


def _arguments(network: Any) -> Dict[str, Any]:
    """Arguments that create a network, including drop rates, which timm leaves out of saved configs."""
    recorded = getattr(network, '_model_args', {})
    rates = {key: value for key, value in recorded.items() if key in ('drop_path_rate', 'drop_block_rate')}
    if hasattr(network, 'drop_rate'):
        rates['drop_rate'] = network.drop_rate
    return get_model_args(network, rates)


def _compare(network: nn.Module, expected: nn.Module) -> None:
    """Raise a ValueError if a network is not built like another one."""
    own, other = dict(network.named_modules()), dict(expected.named_modules())
    for name in {**other, **own}:
        if name not in own or name not in other or type(own[name]) is not type(other[name]):
            found, wanted = (type(modules[name]).__name__ if name in modules else 'missing' for modules in (own, other))
            _refuse(f"'{name}'" if name else 'the network', found, wanted)
        values, wanted_values = _values(own[name]), _values(other[name])
        for key in {**wanted_values, **values}:
            found, wanted = (given.get(key, 'missing') for given in (values, wanted_values))
            if found != wanted:
                _refuse(f"'{key}' of " + (f"'{name}'" if name else 'the network'), found, wanted)


def _refuse(part: str, found: str, wanted: str) -> None:
    raise ValueError(
        f'the model was changed after timm built it: {part} is {found}, and was {wanted}. Undo the change before the '
        f'model is gated, and repeat it on the gated model; or create the model with options that make it.')


def _values(module: nn.Module) -> Dict[str, str]:
    """Attributes of a module as text: numbers, flags and names by value, others by type, hooks by their number."""
    attributes = {
        key: repr(value) if isinstance(value, _PLAIN) else f'a {type(value).__name__}'
        for key, value in vars(module).items() if not key.startswith('_') and key not in _CHANGEABLE}
    return {**attributes, **{key.strip('_'): str(len(getattr(module, key))) for key in _HOOKS}}


@torch.no_grad()
def _compare_outputs(network: Any, gated: Any) -> None:
    """Raise a ValueError if open gates do not give the outputs of the dense network."""
    x = torch.randn(1, network.in_chans, 64, 64, generator=torch.Generator().manual_seed(0))
    x = x.to(next(network.parameters()))
    with evaluation_mode(network), evaluation_mode(gated), force_gates(gated, 'open'):
        expected, outputs = (_listed(model(x)) for model in (network, gated))
    for wanted, output in zip(expected, outputs, strict=True):
        scale = wanted.float().nan_to_num().abs().max()
        tolerance = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 0.02
        if not torch.allclose(output.float(), wanted.float(), rtol=0, atol=float(tolerance * scale), equal_nan=True):
            raise ValueError(
                'the gated model does not give the outputs of the given one. Undo changes that were made after timm '
                'built it before the model is gated.')


def _listed(outputs: Any) -> List[torch.Tensor]:
    """The output of a classifier, or the maps of a feature extractor, as a list."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [*(outputs.values() if isinstance(outputs, dict) else outputs)]
