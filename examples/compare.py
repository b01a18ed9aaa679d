"""Compare the C example with Python: classes of ten real images, in float32 and int8, start-up time and memory

    make example
    python examples/compare.py output/example/classify

The images are ten squares of scikit-learn's two photographs. The network is the packaged `gated_resnet20`, trained on
CIFAR-10; start-up is measured with `gated_resnet34` and random weights. Exits with 1 if five classes or their logits
differ.
"""
import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Sequence, Tuple

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # also the defaults of classify.c
PYTHON = f"""
import sys
import numpy as np
import torch
from PIL import Image
import timm_gated
fast = timm_gated.load_accelerated(sys.argv[1])
torch.set_num_threads(1)
for path in sys.argv[2:]:
    x = torch.from_numpy(np.array(Image.open(path))) / 255
    x = ((x - torch.tensor({MEAN})) / torch.tensor({STD})).permute(2, 0, 1)
    values, classes = fast(x[None])[0].topk(5)
    print(path, *(f' {{k}} {{value:.4f}}' for k, value in zip(classes.tolist(), values.tolist())))
"""


def write_images(folder: Path, side: int, count: int) -> List[str]:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    paths = [str(folder / f'{side}_{index}.ppm') for index in range(count)]
    for index, path in enumerate(paths):
        left = 40 * index
        photos[index % 2].crop((left, 100, left + 224, 324)).resize((side, side)).save(path)
    return paths


def save_network(path: Path, name: str, pretrained: bool, calibration: Sequence[str] = ()) -> str:
    """Save a network, in int8 if there are images to calibrate it."""
    import numpy as np
    import timm
    import torch
    from PIL import Image

    import timm_gated

    options: Dict[str, Any] = {}
    if calibration:
        images = torch.from_numpy(np.stack([np.array(Image.open(image)) for image in calibration])) / 255
        images = ((images - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)
        options = dict(precision='int8', calibration=images)
    timm_gated.accelerate(timm.create_model(name, pretrained=pretrained), **options).save(path)
    return str(path)


# In a small process: until a new process is replaced by its program, its memory is that of its parent.
MEASURE = """
import os, resource, sys, time
begin = time.perf_counter()
status = os.spawnvp(os.P_WAIT, sys.argv[1], sys.argv[1:])
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, file=sys.stderr)
sys.exit(status)
"""


def measure(command: List[str]) -> Tuple[float, ...]:
    """Return the seconds that a process takes, and its largest resident memory in MB."""
    done = subprocess.run([sys.executable, '-c', MEASURE, *command], check=True, capture_output=True, text=True)
    return tuple(map(float, done.stderr.split()[-2:]))


def is_same(ours: str, theirs: str) -> bool:
    """Whether two lines name the same classes in the same order, with logits that agree to 0.001."""
    (name, *a), (other, *b) = ours.split(), theirs.split()
    pairs = list(zip(map(float, a), map(float, b), strict=True))
    return name == other and a[::2] == b[::2] and all(abs(x - y) < 1e-3 for x, y in pairs)


def compare(program: str, network: str, images: List[str]) -> bool:
    """Print the classes of images, and whether C and Python agree."""
    ours, theirs = (
        subprocess.run([*command, network, *images], check=True, capture_output=True, text=True).stdout.splitlines()
        for command in ([program], [sys.executable, '-c', PYTHON]))
    same = [is_same(a, b) for a, b in zip(ours, theirs, strict=True)]
    for line, agrees in zip(ours, same, strict=True):
        print(f'{Path(line.split()[0]).stem}: {"  ".join(line.split("  ")[1:])}'
              f'{"" if agrees else "   different in Python"}')
    print(f'C and Python agree on {sum(same)} of {len(images)} real images: five classes with their logits, '
          f'{Path(network).stem}.\n')
    return len(same) == len(images) and all(same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('program', help='compiled examples/classify.c')
    parser.add_argument('--runs', type=int, default=5, metavar='N', help='timed starts of each (default: %(default)s)')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        images = write_images(folder, 32, 10)
        networks = [
            save_network(folder / 'gated_resnet20.tgn', 'gated_resnet20', True),
            save_network(folder / 'gated_resnet20_int8.tgn', 'gated_resnet20', True, images)]
        same = [compare(args.program, network, images) for network in networks]
        if args.runs:
            arguments = [
                save_network(folder / 'gated_resnet34.tgn', 'gated_resnet34', False), *write_images(folder, 224, 1)]
            print('Start, load gated_resnet34 (88 MB), classify one image of 224 x 224, exit; medians:')
            for name, command in (('C', [args.program]), ('Python', [sys.executable, '-c', PYTHON])):
                runs = [measure([*command, *arguments]) for _ in range(args.runs)]
                seconds, megabytes = (median(values) for values in zip(*runs, strict=True))
                print(f'{name:8} {seconds:6.2f} s {megabytes:6.0f} MB resident')
    return 0 if all(same) else 1


if __name__ == '__main__':
    sys.exit(main())
