"""Networks and images of the inference benchmark

A network is a pair: a gated model and its dense counterpart. Classifiers are models of timm, `pspnet_r50` is mmseg's
PSPNet with a ResNet-50. Segmentors run backbone and decode head and return logits at 1/8 of the image size: neither
the dense nor the gated one resizes them to the image.
"""
from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, Sequence, Tuple

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

__all__ = [
    'Classifier', 'Network', 'PSPNET', 'PSPNet', 'create_images', 'find_network', 'has_mmseg', 'keep_filters',
    'load_images',
]

PSPNET = 'pspnet_r50'
PSPNET_CONFIG = 'mmseg::pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py'


class Network:
    """A gated network and its dense counterpart.

    Attributes:
        name: Name of the gated network.
        dense_name: Name of the dense counterpart.
        image_size: Height and width of the images.
        is_trained: Whether the gates have trained weights.
        has_dense_weights: Whether the dense counterpart has trained weights.
        data_cfg: Preprocessing of the images, as in timm's pretrained configs; timm's defaults by default.
    """
    name: str
    dense_name: str
    image_size: Tuple[int, int]
    is_trained = False
    has_dense_weights = False
    data_cfg: Optional[Dict[str, Any]] = None

    def dense(self) -> nn.Module:
        """Build the dense counterpart."""
        raise NotImplementedError

    def gated(self) -> nn.Module:
        """Build the gated network."""
        raise NotImplementedError

    def variants(self, keep: Sequence[float]) -> Iterator[Tuple[Optional[float], nn.Module]]:
        """Yield the trained network, or one network per share of filters kept."""
        import torch
        if self.is_trained:
            yield None, self.gated().eval()
            return
        for share in keep:
            torch.manual_seed(0)
            yield share, keep_filters(self.gated(), share).eval()


class Classifier(Network):
    """A gated classifier of timm.

    Args:
        name: Name of the model. With a tag, its pretrained weights are loaded; local-dir:FOLDER is a trained model.
        img_size: Image size, that of the model by default.
        checkpoint: Weights of a trained network.
        dense_weights: Trained weights of the dense counterpart: a file, or a name with a tag.
    """

    def __init__(
            self,
            name: str,
            img_size: Optional[int] = None,
            checkpoint: Optional[str] = None,
            dense_weights: Optional[str] = None,
    ) -> None:
        import timm
        import torch

        from timm_gated import GatedNet
        from timm_gated.models import check_model_name, check_weights
        check_model_name(name)
        with torch.device('meta'):
            gated: Any = timm.create_model(name)
        model = gated.pretrained_cfg['architecture']
        if not isinstance(gated, GatedNet):
            raise ValueError(
                f"'{name}' is not a gated network: use a model of timm.list_models('gated_*'), a folder of one as "
                f'local-dir:FOLDER, {PSPNET}, or a number such as 18 for gated_resnet18.')
        self.source, self.checkpoint, self.dense_weights = name, checkpoint, dense_weights
        self.name = name if timm.models.parse_model_name(name)[0] is None else model
        self.has_dense_weights = dense_weights is not None
        self.has_weights = name != model and checkpoint is None
        if self.has_weights:
            check_weights(name, 'Use the name without its tag for random weights.')
        self.is_trained = self.has_weights or checkpoint is not None
        # Without pruned maps, a slim_resnet50 equals timm's resnet50.
        self.dense_variant = gated.dense_variant.removeprefix('slim_')
        self.dense_args = {**gated.dense_args, 'num_classes': gated.num_classes}
        self.dense_name = model.replace('gated_', 'cifar_' if self.dense_variant.startswith('cifar_') else '')
        self.data_cfg = gated.default_cfg
        height, width = gated.default_cfg['input_size'][1:]
        self.image_size = (height, width) if img_size is None else (img_size, img_size)

    def dense(self) -> nn.Module:
        import timm
        import torch

        from timm_gated.models import check_weights
        from timm_gated.utils import explained
        torch.manual_seed(0)
        # zero_init_last would make the weights zero after folding
        dense = timm.create_model(self.dense_variant, zero_init_last=False, **self.dense_args).eval()
        if self.dense_weights is not None:
            with explained(f'{self.dense_weights} does not load into {self.dense_variant}'):
                if Path(self.dense_weights).is_file():
                    timm.models.load_checkpoint(dense, self.dense_weights, weights_only=True)
                else:
                    check_weights(self.dense_weights, 'Give a file, or a model with the tag of its weights.')
                    trained = timm.create_model(self.dense_weights, pretrained=True)
                    dense.load_state_dict(trained.state_dict())
        return dense

    def gated(self) -> nn.Module:
        import timm

        from timm_gated.utils import explained
        if self.has_weights:
            model = timm.create_model(self.source, pretrained=True)
        elif self.checkpoint is not None:
            with explained(f'{self.checkpoint} does not load into {self.name}'):
                model = timm.create_model(self.source, checkpoint_path=self.checkpoint)
        else:
            return timm.create_model(self.source, zero_init_last=False)
        if model.fresh_gates:
            raise ValueError(f'{self.checkpoint or self.name} has no weights for the gates; use a checkpoint of a '
                             f'gated network.')
        return model


class PSPNet(Network):
    """mmseg's PSPNet-R50-d8 without its auxiliary head, which inference does not use.

    Args:
        img_size: Height of the images; the width is twice that.
    """
    name, dense_name = f'gated_{PSPNET}', PSPNET

    def __init__(self, img_size: Optional[int] = None) -> None:
        if not has_mmseg():
            raise ValueError(f"{PSPNET} needs mmsegmentation, which is not installed: pip install 'timm-gated[mmseg]'.")
        height = 288 if img_size is None else img_size
        self.image_size = height, 2 * height

    def dense(self) -> nn.Module:
        return self._build('EncoderDecoder', 'ResNetV1c')

    def gated(self) -> nn.Module:
        return self._build('GatedEncoderDecoder', 'GatedResNetV1c')

    def _build(self, segmentor: str, backbone: str) -> nn.Module:
        import torch

        import mmseg_plugin  # noqa: F401  (before mmseg)

        # isort: split
        from mmengine.hub import get_config
        from mmengine.registry import DefaultScope
        from mmseg.registry import MODELS
        cfg = get_config(PSPNET_CONFIG).model
        norm_cfg = dict(type='BN', requires_grad=True)
        cfg.update(type=segmentor, pretrained=None, auxiliary_head=None)
        cfg.backbone.update(type=backbone, norm_cfg=norm_cfg)
        cfg.decode_head.update(norm_cfg=norm_cfg)
        torch.manual_seed(0)
        with DefaultScope.overwrite_default_scope('mmseg'):
            return MODELS.build(cfg).eval()


def has_mmseg() -> bool:
    return importlib.util.find_spec('mmseg') is not None


def find_network(
        name: str,
        img_size: Optional[int] = None,
        checkpoint: Optional[str] = None,
        dense_weights: Optional[str] = None,
) -> Network:
    """Find a network by its name on the command line.

    Args:
        name: Name of a gated model of timm, 'pspnet_r50', or the depth of a ResNet for ImageNet.
        img_size: Image size (height for segmentors), that of the network by default.
        checkpoint: Weights of a trained classifier.
        dense_weights: Trained weights of its dense counterpart.
    """
    if name == PSPNET:
        if checkpoint is not None or dense_weights is not None:
            raise ValueError(f'weights are for a classifier, got {PSPNET}.')
        return PSPNet(img_size)
    return Classifier(f'gated_resnet{name}' if name.isdigit() else name, img_size, checkpoint, dense_weights)


def keep_filters(model: nn.Module, share: float) -> nn.Module:
    """Set the gate biases in place so that each gate keeps a random share of its filters, the same for all images."""
    import torch

    from timm_gated import gates
    generator = torch.Generator().manual_seed(0)
    for _, gate in gates(model):
        order = torch.randperm(gate.num_gates, generator=generator)
        with torch.no_grad():
            gate.fc2.weight.zero_()
            gate.fc2.bias.fill_(-1.)
            gate.fc2.bias[order[:round(share * gate.num_gates)]] = 1.
    return model


def create_images(network: Network, data_dir: str) -> Any:
    """Create the validation set of an image folder, as the network gets its images."""
    import timm
    config = timm.data.resolve_data_config({'input_size': (3, *network.image_size)}, network.data_cfg)
    dataset = timm.data.create_dataset('', data_dir, split='validation')
    dataset.transform = timm.data.create_transform(**config)
    return dataset


def load_images(network: Network, data_dir: Optional[str], count: int, seed: int = 0) -> torch.Tensor:
    """Load images of a data set, or draw noise.

    Args:
        network: Network that determines the image size.
        data_dir: Image folder; noise by default.
        count: Number of images, spread over the data set.
        seed: Seed of the noise, or the number of images to skip.
    """
    import torch
    if data_dir is None:
        return torch.randn(count, 3, *network.image_size, generator=torch.Generator().manual_seed(seed))
    dataset = create_images(network, data_dir)
    step = max(1, len(dataset) // count)
    return torch.stack([dataset[(seed + i * step) % len(dataset)][0] for i in range(count)])
