#!/usr/bin/env bash
# Run one of the CIFAR-10 trainings by name:
#
#     python tools/prepare_cifar10.py --source cifar-10-python.tar.gz --output data/cifar10
#     bash experiments/cifar10/run.sh c_dense20              # from the root of this repository
#
# Environment: TRAIN, path of timm's train.py; DATA, folder of the images; RUNS, output folder. Add --resume FILE to
# continue a run that was stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
configs=configs/timm/cifar10
name=${1:?give the name of a run, see this file}
shift
more=("$@")

train() {
    OMP_NUM_THREADS=${THREADS:-1} python "${TRAIN:-train.py}" --data-dir "${DATA:-data/cifar10}" \
        --output "${RUNS:-runs}" --experiment "$name" --seed 42 --device cpu --amp --amp-dtype bfloat16 --workers 1 \
        --checkpoint-hist 1 "$@" ${more[@]+"${more[@]}"}
}

# A dense network from scratch in few epochs: config, epochs.
dense() {
    train --config "$configs/$1.yaml" --epochs "$2" --batch-size 128 --lr 0.15 --sched cosine --sched-on-updates \
        --min-lr 0 --warmup-epochs 2 --warmup-lr 0.01 --channels-last --log-interval 100
}

# The packaged dense network, gated in 20 epochs with distillation: config, further options.
gate() { train --config "$configs/$1_from_dense.yaml" --channels-last --log-interval 100 "${@:2}"; }

# The runs of version 0.1, with the settings that they were run with.
again() { train --config "experiments/cifar10/$name/args.yaml" --log-interval 50 "$@"; }
e20=timm_gated/weights/cifar_resnet20.e20_c10.safetensors  # the last epoch of a_dense

case $name in
    # Dense networks from scratch. c_dense20 is packaged as cifar_resnet20.e40_c10, c_dense32 as cifar_resnet32.e30_c10.
    c_dense20) dense cifar_resnet20 40 ;;
    c_dense20_50) dense cifar_resnet20 50 ;;
    c_dense32) dense cifar_resnet32 30 ;;
    # Gated from those.
    c_gated32) gate gated_resnet32 ;;
    c_more20) gate cifar_resnet20 ;;
    c_gated20_70) gate gated_resnet20 ;;
    c_gated20_50) gate gated_resnet20 --model-kwargs from_dense=20 budget=0.5 budget_weight=20.0 ;;
    # The budget alone, and both again with another seed.
    c_budget70) gate gated_resnet20 --model-kwargs from_dense=20 lam=0 budget=0.7 budget_weight=20.0 ;;
    c_gated20_70_seed1) gate gated_resnet20 --seed 1 ;;
    c_budget70_seed1) gate gated_resnet20 --seed 1 --model-kwargs from_dense=20 lam=0 budget=0.7 budget_weight=20.0 ;;
    # Version 0.1. Track A: 20 epochs from scratch, the paper's schedules of 500 shortened in proportion. a_bas_mean was
    # stopped after 4 epochs.
    a_dense | a_bas | a_bas_mean) again ;;
    # Track B: 8 epochs from the dense weights of track A, without distillation. b_l0_gamma8 was stopped in epoch 3.
    b_dense | b_bas_* | b_budget70 | b_l0_* | b_aig70) again --initial-checkpoint $e20 ;;
    *) echo "error: unknown run '$name', see the list in this file." >&2 && exit 1 ;;
esac
