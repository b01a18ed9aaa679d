"""Images and a small gated model for the tutorials

    python examples/digits.py digits

Writes the handwritten digits of scikit-learn, which are part of its package, as image folders for timm's scripts and
this package's tools: digits/images/{train,validation}/<digit>/<index>.png, 1,400 and 397 images of 32 x 32 pixels. Then
trains the packaged ResNet-20 on them, gates it to 60 % of the MACs and saves it as digits/model, with the distribution
of the gates over training in digits/snapshots.
"""
import sys
from pathlib import Path

import timm
import torch
import torch.nn as nn
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask

import timm_gated


def write_images(folder: Path) -> None:
    data = load_digits()
    for index, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        path = folder / ('train' if index < 1400 else 'validation') / str(label) / f'{index:04d}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype('uint8')).convert('RGB').resize((32, 32), Image.BILINEAR).save(path)


def train(model: nn.Module, images: Path, epochs: int, lr: float) -> None:
    """timm's loader, task and optimizer, as in its train.py."""
    data = resolve_data_config(model=model)
    dataset = create_dataset('', images, 'train', is_training=True)
    loader = create_loader(
        dataset, data['input_size'], batch_size=32, is_training=True, no_aug=True, use_prefetcher=False, num_workers=0,
        mean=data['mean'], std=data['std'])
    task = ClassificationTask(model.train(), nn.CrossEntropyLoss(), verbose=False)
    optimizer = create_optimizer_v2(model, opt='sgd', lr=lr, weight_decay=1e-4)
    for epoch in range(epochs):
        task.set_epoch(epoch)
        for batch, labels in loader:
            result = task(batch, labels)
            optimizer.zero_grad()
            result['loss'].backward()
            optimizer.step()
        print(f'epoch {epoch}: task loss {result["task_loss"].item():.3f}, MACs {result["macs_share"].item():.1%}')


def main(folder: Path) -> None:
    torch.manual_seed(0)
    write_images(folder / 'images')
    dense = timm.create_model('cifar_resnet20', pretrained=True)
    model = timm.create_model('gated_resnet20', from_dense=4, budget=0.6, snapshot_dir=str(folder / 'snapshots'))
    model.load_state_dict(timm_gated.checkpoint_filter_fn(dense.state_dict(), model))
    train(model, folder / 'images', epochs=4, lr=0.05)
    timm_gated.save_pretrained(model.eval(), folder / 'model')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
