# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer over an engine: a small Llama learns to count.

torchrun --nproc_per_node 2 examples/transformers/train.py 3
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = {
    "train_micro_batch_size_per_gpu": "auto",  # "auto": as the arguments below say
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": int(sys.argv[1]) if len(sys.argv) > 1 else 2},
}
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    deepspeed=config,
    use_cpu=not torch.cuda.is_available(),
    bf16=True,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    max_steps=30,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
)
numbers = (torch.arange(256)[:, None] + torch.arange(16)) % 32
data = [{"input_ids": row, "labels": row} for row in numbers]
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **shape))
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()  # logs loss and grad_norm
logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
sys.exit(logged[-1] > 0.5 * logged[0])
