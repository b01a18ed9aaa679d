#!/usr/bin/env bash
# Run one of the CamVid trainings by name, from the root of this repository; CamVid must be in data/camvid:
#
#     bash experiments/camvid/run.sh dense
#     bash experiments/camvid/run.sh gated
#
# Further arguments go to mmseg's train.py, such as --resume.
set -euo pipefail
cd "$(dirname "$0")/../.."
mmseg=$(python -c "import importlib.util as u, pathlib as p; print(p.Path(u.find_spec('mmseg').origin).parent / '.mim')")
configs=configs/mmseg/pspnet
name=${1:?give the name of a run, see this file}
shift
more=("$@")
dense=pspnet_r18-d8_1xb8-600_camvid-160x208
gated=gated-pspnet_r18-d8_1xb8-600-from-dense_camvid-160x208

run() {
    python "$mmseg/tools/train.py" "$configs/$1.py" --work-dir "work_dirs/${2:-$1}" ${more[@]+"${more[@]}"} \
        ${3:+--cfg-options "${@:3}"}
}

case $name in
    dense) run $dense ;;  # 600 iterations
    more) run $dense ${dense}_more load_from=work_dirs/$dense/iter_600.pth ;;  # 600 more
    gated) run $gated ;;  # gated in 600 more
    *) echo "error: unknown run '$name', see the list in this file." >&2 && exit 1 ;;
esac
