#!/usr/bin/env bash
# The commands of this folder's runs: bash cmd.sh [native] [te]
# PYTHON is an interpreter with the packages of env.json; OUT_DIR is where a run may write.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
export OUT_DIR="${OUT_DIR:-runs/again}"
mkdir -p "$OUT_DIR"

# >>> native
native() {
  export DATA_PATH="${DATA_PATH:-data/enwiki/enwiki_text_document}"
  export TOKENIZER_MODEL="${TOKENIZER_MODEL:-data/enwiki/enwiki_tokenizer}"
  export MCE_DEVICE=cpu
  export OMP_NUM_THREADS=1
  export CUDA_DEVICE_MAX_CONNECTIONS=1
  "$PYTHON" -m megatron_ce_adaptor.megatron.forked_torchrun \
    --nproc-per-node 8 --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    -m megatron_ce_adaptor.megatron.pretrain \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --expert-model-parallel-size 2 \
    --expert-tensor-parallel-size 1 \
    --sequence-parallel \
    --use-distributed-optimizer \
    --distributed-backend gloo \
    --num-layers 2 \
    --hidden-size 64 \
    --ffn-hidden-size 128 \
    --num-attention-heads 4 \
    --seq-length 64 \
    --max-position-embeddings 64 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --num-experts 4 \
    --moe-router-topk 2 \
    --moe-router-load-balancing-type aux_loss \
    --moe-aux-loss-coeff 0.01 \
    --moe-token-dispatcher-type alltoall \
    --cross-entropy-loss-fusion \
    --cross-entropy-fusion-impl native \
    --transformer-impl local \
    --attention-backend unfused \
    --no-gradient-accumulation-fusion \
    --no-masked-softmax-fusion \
    --no-bias-swiglu-fusion \
    --no-bias-dropout-fusion \
    --no-rope-fusion \
    --no-persist-layer-norm \
    --train-iters 2000 \
    --micro-batch-size 2 \
    --global-batch-size 4 \
    --optimizer adam \
    --lr 0.0005 \
    --min-lr 5e-05 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.1 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --init-method-std 0.02 \
    --seed 1234 \
    --data-path "${DATA_PATH}" \
    --split 1,0,0 \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model "${TOKENIZER_MODEL}" \
    --num-workers 0 \
    --no-create-attention-mask-in-dataloader \
    --log-interval 1 \
    --eval-iters 0 \
    --eval-interval 1000000 \
    --lr-decay-iters 2000
}
# <<< native

# >>> te
te() {
  export DATA_PATH="${DATA_PATH:-data/enwiki/enwiki_text_document}"
  export TOKENIZER_MODEL="${TOKENIZER_MODEL:-data/enwiki/enwiki_tokenizer}"
  export MCE_DEVICE=cpu
  export OMP_NUM_THREADS=1
  export CUDA_DEVICE_MAX_CONNECTIONS=1
  "$PYTHON" -m megatron_ce_adaptor.megatron.forked_torchrun \
    --nproc-per-node 8 --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    -m megatron_ce_adaptor.megatron.pretrain \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --expert-model-parallel-size 2 \
    --expert-tensor-parallel-size 1 \
    --sequence-parallel \
    --use-distributed-optimizer \
    --distributed-backend gloo \
    --num-layers 2 \
    --hidden-size 64 \
    --ffn-hidden-size 128 \
    --num-attention-heads 4 \
    --seq-length 64 \
    --max-position-embeddings 64 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --num-experts 4 \
    --moe-router-topk 2 \
    --moe-router-load-balancing-type aux_loss \
    --moe-aux-loss-coeff 0.01 \
    --moe-token-dispatcher-type alltoall \
    --cross-entropy-loss-fusion \
    --cross-entropy-fusion-impl te \
    --transformer-impl local \
    --attention-backend unfused \
    --no-gradient-accumulation-fusion \
    --no-masked-softmax-fusion \
    --no-bias-swiglu-fusion \
    --no-bias-dropout-fusion \
    --no-rope-fusion \
    --no-persist-layer-norm \
    --train-iters 2000 \
    --micro-batch-size 2 \
    --global-batch-size 4 \
    --optimizer adam \
    --lr 0.0005 \
    --min-lr 5e-05 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.1 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --init-method-std 0.02 \
    --seed 1234 \
    --data-path "${DATA_PATH}" \
    --split 1,0,0 \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model "${TOKENIZER_MODEL}" \
    --num-workers 0 \
    --no-create-attention-mask-in-dataloader \
    --log-interval 1 \
    --eval-iters 0 \
    --eval-interval 1000000 \
    --lr-decay-iters 2000
}
# <<< te

for run in "${@:-te}"; do "$run"; done
