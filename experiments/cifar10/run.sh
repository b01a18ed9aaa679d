#!/usr/bin/env bash
# Run one of the CIFAR-10 trainings by name:
#
#     python tools/prepare_cifar10.py --source cifar-10-python.tar.gz --output data/cifar10
#     bash experiments/cifar10/run.sh a_dense              # from the root of this repository
#
# Environment: TRAIN, path of timm's train.py; DATA, folder of the images; RUNS, output folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
configs=configs/timm/cifar10
dense=timm_gated/weights/cifar_resnet20.e20_c10.safetensors  # the last epoch of a_dense

train() {
    local config=$1
    shift
    OMP_NUM_THREADS=1 python "${TRAIN:-train.py}" --config "$configs/$config.yaml" --data-dir "${DATA:-data/cifar10}" \
        --output "${RUNS:-runs}" --experiment "$name" --seed 42 --device cpu --amp --amp-dtype bfloat16 --workers 1 \
        --checkpoint-hist 1 --log-interval 50 "$@"
}

gate() { train gated_resnet20_from_dense --initial-checkpoint $dense --model-kwargs from_dense=8 "$@"; }
l0() { train gated_resnet20_l0_from_dense --initial-checkpoint $dense --model-kwargs from_dense=8 lam=0 "$@"; }

name=${1:?give the name of a run, see this file}
case $name in
    # Track A: 20 epochs from scratch, the paper's schedules of 500 shortened in proportion.
    a_dense) train cifar_resnet20 --epochs 20 --decay-milestones 13 16 19 ;;
    a_bas)
        train gated_resnet20 --epochs 20 --decay-milestones 13 16 19 \
            --model-kwargs lam=0.75 "lam_epochs=(0,4)" gamma=1.25 "gamma_epochs=(4,12)" ;;
    # The first 4 epochs of a_bas, with the mean over gates instead of the sum.
    a_bas_mean)
        train gated_resnet20 --epochs 4 --decay-milestones 13 16 19 \
            --model-kwargs lam=0.75 "lam_epochs=(0,4)" lam_reduction=mean gamma=0 ;;
    # Track B: 8 epochs from the dense weights of track A, one learning rate schedule for all.
    b_dense) train cifar_resnet20_from_dense --initial-checkpoint $dense ;;
    b_bas_budget70) gate budget=0.7 budget_weight=20.0 ;;
    b_bas_budget70_strong) gate lam=0.01 budget=0.7 budget_weight=20.0 ;;
    b_bas_budget70_strong_noiseless) gate lam=0.01 budget=0.7 budget_weight=20.0 "noise_epochs=(0,0)" ;;
    b_budget70) gate lam=0 budget=0.7 budget_weight=20.0 ;;
    b_bas_gamma1) gate lam=0.01 gamma=1.0 ;;
    b_bas_gamma12) gate lam=0.01 gamma=1.2 ;;
    b_bas_gamma15) gate lam=0.01 gamma=1.5 ;;
    b_l0_gamma1) l0 gamma=1.0 ;;
    b_l0_gamma2) l0 gamma=2.0 ;;
    b_l0_gamma25) l0 gamma=2.5 ;;
    b_l0_gamma8) l0 gamma=8.0 ;;  # stopped in epoch 3, with 3 % of the gates open
    b_aig70) train convnet_aig_resnet20_from_dense --initial-checkpoint $dense ;;
    *) echo "error: unknown run '$name', see the list in this file." >&2 && exit 1 ;;
esac
