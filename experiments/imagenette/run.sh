#!/usr/bin/env bash
# Run one of the Imagenette trainings by name, from the root of this repository:
#
#     bash experiments/imagenette/run.sh dense
#     bash experiments/imagenette/run.sh gated
#
# Environment: TRAIN, path of timm's train.py; DATA, folder of the images (train and val); RUNS, output folder. Further
# arguments go to train.py, such as --resume FILE.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-runs/imagenette}
name=${1:?give the name of a run, see this file}
shift
more=("$@")

train() {
    OMP_NUM_THREADS=${THREADS:-1} python "${TRAIN:-train.py}" --config "configs/timm/imagenet/$1.yaml" \
        --data-dir "${DATA:-data/imagenette}" --num-classes 10 --img-size 128 --batch-size 64 --scale 0.35 1.0 \
        --output "$runs" --experiment "$name" --seed 42 --device cpu --amp --amp-dtype bfloat16 --channels-last \
        --workers 1 --checkpoint-hist 1 --log-interval 50 --sched cosine --sched-on-updates --min-lr 0 "${@:2}" \
        ${more[@]+"${more[@]}"}
}

case $name in
    dense) train resnet18 --epochs 16 --lr 0.1 --warmup-epochs 2 --warmup-lr 0.01 --weight-decay 5e-4 ;;
    gated)
        dense=$runs/dense/last.pth.tar
        python tools/hub.py save --model resnet18 --checkpoint "$dense" --num-classes 10 --output "$runs/teacher"
        train gated_resnet18 --initial-checkpoint "$dense" --epochs 8 --lr 0.02 --weight-decay 5e-4 \
            --kd-model-name "local-dir:$runs/teacher" --model-kwargs from_dense=8 budget=0.5 budget_weight=20.0 ;;
    *) echo "error: unknown run '$name', see the list in this file." >&2 && exit 1 ;;
esac
