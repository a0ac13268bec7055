#!/usr/bin/env bash
# The long run of an 8-card Atlas A2 (Ascend 910B3): native, then te, TP2 PP2 EP2, 2000 steps each on your tokenised text, then
# comparison, report and one folder to hand in.
#
#   source st_scripts/env_npu.sh
#   DATA_PATH=.../enwiki_text_document TOKENIZER_MODEL=.../tokenizer bash st_scripts/a2_8p_longrun.sh
#
#   --impl WHICH   train only `native` or only `te`, default both; compared as soon as the folder holds both
#   --save-every N a checkpoint every N steps, the two newest of each run in DIR/checkpoints (or in CKPT_DIR)
#   --resume       continue where an earlier call with the same arguments ended; what is complete is not run again
#   --noise-floor  a third run: native with its first logits off by one ulp, drawn beside te's error in the report
#   --out DIR      the folder to hand in, default runs/a2_8p
# Variables, as in MindSpeed's system tests:
#   DATA_PATH        prefix of .bin and .idx, without the suffix          TRAIN_ITERS   steps of each run (2000)
#   TOKENIZER_MODEL  tokenizer folder, or VOCAB_FILE and MERGE_FILE: GPT-2's two files
#   MBS GBS          micro and global batch in samples (2, 16)            TP PP EP CP   parallel sizes (2, 2, 2, 1)
#   CKPT_DIR         checkpoints, below it native/ and te/; none if unset; SAVE_INTERVAL steps between them (1000)
#   NPUS_PER_NODE    processes, one a card (8)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT    several machines; the verdict is on the one with the highest NODE_RANK
#   MEGATRON_PATH    a Megatron-LM checkout whose pretrain_gpt.py is run; without it the installed megatron-core trains
#   PYTHON           the Python of the stack (torch_npu, MegatronAdaptor ...), default .venv/bin/python
#   TRANSFORMER_IMPL transformer_engine with TransformerEngineNPU's layers; default local
#   DRY_RUN=1        print environment and torchrun line of both runs, start nothing
#   DEVICE=cpu       the same on CPU cores, with sizes small enough for two of them and TRAIN_ITERS 5
# Exit status: 0 all gates met, 1 a gate not met or a run failed, 2 refused before the start, 128+N stopped by signal N.
set -euo pipefail
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"
# shellcheck source=st_scripts/pretrain_common.sh
source "$(dirname "$SCRIPT")/pretrain_common.sh"

implementations=(native te)
out=runs/a2_8p
more=()
resume=0
noise_floor=0
while [ $# -gt 0 ]; do
  case "$1" in
    --impl) need_value "$1" $#; choose_implementations "$2"; shift 2 ;;
    --out) need_value "$1" $#; out="$(caller_path "$2")"; shift 2 ;;
    --save-every) need_value "$1" $#; more+=(--save-every "$2"); shift 2 ;;
    --resume) resume=1; shift ;;
    --noise-floor) noise_floor=1; shift ;;
    -h | --help) show_help; exit 0 ;;
    *) die 2 "unknown argument $1; see --help." ;;
  esac
done

# What env_npu.sh has exported says nothing about this run; DEVICE does.
case "${DEVICE:-npu}" in
  npu) export MCE_DEVICE=npu ;;
  cpu)
    export MCE_DEVICE=cpu TRAIN_ITERS="${TRAIN_ITERS:-5}" MBS="${MBS:-2}" GBS="${GBS:-4}" DISTRIBUTED_BACKEND=gloo NUM_WORKERS=0
    export NUM_LAYERS=2 HIDDEN_SIZE=64 FFN_HIDDEN_SIZE=128 NUM_ATTENTION_HEADS=4 SEQ_LENGTH=64 NUM_EXPERTS=4
    ;;
  *) die 2 "DEVICE is npu or cpu, not $DEVICE." ;;
esac
CONFIG="$(caller_path "${CONFIG:-$REPO/configs/a2_8p.yaml}")"
choose_configuration

nodes="${NNODES:-1}"
node_rank="${NODE_RANK:-0}"
if [[ "$nodes" =~ ^[0-9]+$ && "$node_rank" =~ ^[0-9]+$ && "$node_rank" -lt $((nodes - 1)) ]]; then
  out="$out.node$node_rank" # machines may share the disk
fi
out="${out#"$REPO"/}"
dry_run="${DRY_RUN:-0}"
# Relative to where the caller is, not to this checkout.
for name in DATA_PATH TOKENIZER_MODEL MEGATRON_PATH; do
  [ -z "${!name:-}" ] || [ "$CALLER_DIR" = "$REPO" ] || export "$name"="$(caller_path "${!name}")"
done

[ -n "${DATA_PATH:-}" ] || [ "$DEVICE" = cpu ] || die 2 "DATA_PATH is not set: export the prefix of your .bin and .idx, without the suffix."
# GPT2BPETokenizer would look for more than these two files on the internet; a tokenizer folder is complete.
if [ -n "${VOCAB_FILE:-}${MERGE_FILE:-}" ] && [ -z "${TOKENIZER_MODEL:-}" ] && [ -z "${TOKENIZER_TYPE:-}" ]; then
  for name in VOCAB_FILE MERGE_FILE; do
    [ -n "${!name:-}" ] || die 2 "$name is not set: GPT-2's tokenizer needs VOCAB_FILE and MERGE_FILE."
    [ -f "$(caller_path "${!name}")" ] || die 2 "$name is ${!name}, and there is no such file."
  done
  TOKENIZER_MODEL="$out/tokenizer"
  if [ "$dry_run" = 0 ]; then
    mkdir -p "$TOKENIZER_MODEL"
    cp "$(caller_path "$VOCAB_FILE")" "$TOKENIZER_MODEL/vocab.json"
    cp "$(caller_path "$MERGE_FILE")" "$TOKENIZER_MODEL/merges.txt"
    printf '{"tokenizer_class": "GPT2Tokenizer"}\n' > "$TOKENIZER_MODEL/tokenizer_config.json"
  fi
  unset VOCAB_FILE MERGE_FILE
fi
checkpoints="${CKPT_DIR:-}"

train() { # train NAME IMPLEMENTATION ARGUMENTS...
  local name="$1" implementation="$2" words=("${@:3}" "${more[@]}")
  # What was never started begins at step 1.
  if [ "$resume" = 1 ] && [ -f "$out/$name.status.json" ]; then words+=(--resume); fi
  [ -z "$checkpoints" ] || CKPT_DIR="$(caller_path "$checkpoints")/$name"
  if [ "$dry_run" != 0 ]; then
    printf '# --- %s\ncd %q\nsource st_scripts/env_%s.sh || true\n' "$name" "$REPO" "$DEVICE"
    for name in MEGATRON_PATH ASCEND_RT_VISIBLE_DEVICES MCE_IMPLEMENTATION MCE_OVERWRITE TE_PARALLEL_CE_FORCE_TRITON; do
      [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}"
    done
  else
    say "Training with $implementation${words[*]:+ (${words[*]})} ..."
  fi
  (run_pretrain "$implementation" --out "$out" "${words[@]}")
}
for implementation in "${implementations[@]}"; do train "$implementation" "$implementation"; done
[ "$noise_floor" = 0 ] || train noise_floor native --noise-floor
[ "$dry_run" = 0 ] || exit 0

if [[ "$out" == *.node"$node_rank" ]]; then
  say "Done. The verdict is made on the machine with NODE_RANK=$((nodes - 1))."
  exit 0
fi
if [ ! -f "$out/native.log" ] || [ ! -f "$out/te.log" ]; then
  say "No comparison yet: $out holds only the log of ${implementations[*]}."
  exit 0
fi
gates=()
# Cards that nobody else uses can tell which is faster; shared CPU cores cannot.
[ "$DEVICE" != npu ] || gates=(--gates configs/gates_a2.yaml)
python="$(python_of_stack)"
status=0
say "Comparing ..."
"$python" -m megatron_ce_adaptor.cli compare "$out" "${gates[@]}" || status=$?
"$python" -m megatron_ce_adaptor.longrun.hand_in "$out" --scripts st_scripts "$CONFIG" || exit 1
exit "$status"
