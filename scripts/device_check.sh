#!/usr/bin/env bash
# The first paper's full-size runs on one GPU, for at most LIMIT seconds a call; the same call again continues them.
#
#   DATA=<folder with cifar10/, cifar100/, ...> bash scripts/device_check.sh
#
# Decay 0 and 5e-4 of ResNet-18 come first: the two published points. LIMIT (480), RUNS (results/runs), SCALE (paper),
# DEVICE (cuda), SEED (1), PYTHON (python3), OUT (a folder that gets every record but the weights), WHEELS (a folder with
# wheels of hydra-core, omegaconf and antlr4-python3-runtime, for a machine without them and without a network).
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} SCALE=${SCALE:-paper} DEVICE=${DEVICE:-cuda} SEED=${SEED:-1}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" BACKRANK_RUNS=${RUNS:-$PWD/results/runs}
[ -z "${DATA:-}" ] || export BACKRANK_DATA=$DATA
failed=0 ends=$(( $(date +%s) + ${LIMIT:-480} ))

if ! "$PYTHON" -c 'import hydra, omegaconf' 2>/dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --find-links "${WHEELS:-wheels}" hydra-core omegaconf || exit 2
fi
"$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")'

while read -r experiment arm; do
    left=$(( ends - $(date +%s) ))
    [ "$left" -gt 20 ] || { echo "time is up before $experiment $arm"; break; }
    timeout --signal=TERM --kill-after=15 "$left" "$PYTHON" -m backrank.run "experiment=backward_bottleneck/$experiment" \
        "arm=$arm" "seed=$SEED" "scale=$SCALE" "device=$DEVICE" 2>&1 | grep -v '^step' # the record has the steps
    case ${PIPESTATUS[0]} in
        0) ;;
        124 | 130) echo "$experiment $arm: saved, the same call continues it"; break ;;
        *) echo "$experiment $arm: failed"; failed=1 ;;
    esac
done <<RUNS_IN_ORDER
resnet18_weight_decay wd_0
resnet18_weight_decay wd_5e-4
resnet18_weight_decay wd_1e-4
resnet18_weight_decay wd_1e-3
vit_weight_decay wd_0
vit_weight_decay wd_budget
vit_weight_decay wd_published
gpt2_weight_decay wd_0
gpt2_weight_decay wd_budget
gpt2_weight_decay wd_published
RUNS_IN_ORDER

if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    (cd "$BACKRANK_RUNS" && tar cf - --exclude=checkpoint.pt --exclude=.locks .) | tar xf - -C "$OUT"
fi
exit "$failed"
