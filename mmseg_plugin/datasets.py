"""CamVid: road scenes, small enough to train on two CPU cores

Brostow, Fauqueur, Cipolla: Semantic object classes in video: A high-definition ground truth database (2009), in the
usual split into 367 / 101 / 233 images of 480 x 360 pixels and eleven classes.
"""
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS

__all__ = ['CamVidDataset']


@DATASETS.register_module()
class CamVidDataset(BaseSegDataset):
    """CamVid with eleven classes. Label files hold the index of the class; 255 is ignored.

    Args:
        img_suffix: Suffix of the image files.
        seg_map_suffix: Suffix of the label files.
        **kwargs: Arguments of mmseg's BaseSegDataset.
    """

    METAINFO = dict(
        classes=(
            'sky', 'building', 'pole', 'road', 'pavement', 'tree', 'sign', 'fence', 'car', 'pedestrian', 'bicyclist'),
        palette=[
            [128, 128, 128], [128, 0, 0], [192, 192, 128], [128, 64, 128], [60, 40, 222], [128, 128, 0],
            [192, 128, 128], [64, 64, 128], [64, 0, 128], [64, 64, 0], [0, 128, 192]])

    def __init__(self, img_suffix: str = '.jpg', seg_map_suffix: str = '.png', **kwargs) -> None:
        super().__init__(img_suffix=img_suffix, seg_map_suffix=seg_map_suffix, reduce_zero_label=False, **kwargs)
