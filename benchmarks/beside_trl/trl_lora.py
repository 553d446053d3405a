"""TRL's GRPOTrainer with PEFT at the work of `lora_work.py`: as `trl_grpo.py`, with an adapter and a KL term.

The reference is the model with its adapter switched off, as TRL has it. PEFT keeps the adapter in float32.
"""

from __future__ import annotations

import json
import sys

from peft import LoraConfig

from benchmarks.beside_trl.lora_work import LoraWork
from benchmarks.beside_trl.trl_grpo import make_trainer, measure

if __name__ == "__main__":
    asked = LoraWork(**json.loads(sys.argv[1]))
    adapter = LoraConfig(r=asked.rank, lora_alpha=asked.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    print(json.dumps(measure(asked, make_trainer(asked, asked.kl_coefficient, adapter))))
