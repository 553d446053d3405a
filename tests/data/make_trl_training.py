"""Write trl_training.json: what TRL's own trainers made of tiny models in a few optimizer steps, on a CPU in float32.

    pip install --no-deps --target /tmp/trl trl==1.16.0 datasets==5.2.0 multiprocess pandas python-dateutil six
    PYTHONPATH=.:/tmp/trl python tests/data/make_trl_training.py

torch, transformers and accelerate are those of constraints.txt. Changed in the trainers: they keep the loss of each
step as it is, completions are given in place of a generation, and the rows of a generation are not shuffled.
"""

import json
from pathlib import Path
from tempfile import mkdtemp

import torch
import trl
import trl.trainer.grpo_trainer
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from tests.support.formula_model import change, make_formula_adapter, make_formula_model, numbers
from tests.tasks.small_tokenizer import WORDS

FILE = Path(__file__).with_name("trl_training.json")
OPTIMIZER = {
    "learning_rate": 3e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "max_grad_norm": 20.0,
    "lr_scheduler_type": "linear", "max_steps": 3, "per_device_train_batch_size": 4, "bf16": False,
    "save_strategy": "no",
}  # fmt: skip
HALVES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
ONLINE = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
QUARTERS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TWO_STEPS = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 6}
TWICE = {"num_iterations": 2, "max_steps": 6}
ADAPTER = {
    "use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0,
}  # fmt: skip
CASES = {
    "sft": ("sft", "qwen3", {}),
    "sft, accumulated, cosine": ("sft", "llama", {**HALVES, "lr_scheduler_type": "cosine"}),
    "sft, clipped": ("sft", "qwen3", {"max_grad_norm": 0.5}),
    "dpo": ("dpo", "qwen3", HALVES),
    "dpo, ipo": ("dpo", "llama", {"loss_type": "ipo", "beta": 0.2}),
    "dpo, robust": ("dpo", "qwen3", {"loss_type": "robust", "label_smoothing": 0.1}),
    "dpo, a reference that follows": (
        "dpo", "qwen3", {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7},
    ),
    "dpo, an adapter": ("dpo", "qwen3", {**HALVES, **ADAPTER}),
    "kto": ("kto", "qwen3", {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}),
    "reward": ("reward", "qwen3", {**HALVES, "center_rewards_coefficient": 0.05}),
    "grpo, dapo": ("grpo", "qwen3", {**QUARTERS, "loss_type": "dapo"}),
    "grpo, rows, k3, twice": (
        "grpo", "llama", {**QUARTERS, **TWICE, "loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
    "grpo, k2": ("grpo", "qwen3", {"loss_type": "grpo", "beta": 0.1}),
    "grpo, rows, mini-batches": (
        "grpo", "qwen3", {**TWO_STEPS, "loss_type": "grpo", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    "dr_grpo": ("grpo", "qwen3", {**QUARTERS, "loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gspo": (
        "grpo", "qwen3",
        {
            **TWO_STEPS, "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01,
            "epsilon_high": 0.02,
        },
    ),
    "cispo": ("grpo", "qwen3", {**TWICE, "loss_type": "cispo", "epsilon_high": 1.02}),
    "grpo, cut ones masked": ("grpo", "qwen3", {"loss_type": "dapo", "mask_truncated_completions": True}),
    "rloo": ("rloo", "qwen3", {**QUARTERS, "beta": 0.05}),
}  # fmt: skip
KINDS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig), "reward": (trl.RewardTrainer, trl.RewardConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
}  # fmt: skip


def drawn(seed: int, count: int, below: int) -> list[int]:
    """Whole numbers from 0 to below that one."""
    return [int((value + 0.5) * below) for value in numbers(seed, torch.Size([count]))]


def words(seed: int, most: int) -> str:
    (length,) = drawn(seed + 0.5, 1, most)
    return " ".join(WORDS[5 + word] for word in drawn(seed, 1 + length, len(WORDS) - 5))


def rows(trainer: str) -> list[dict]:
    """Rows in the order in which they are trained on. The first of each batch has KTO's longest prompt and answer."""
    made = []
    for number in range(12):
        longest = trainer == "kto" and number % 4 == 0
        prompt, *answers = (" ".join(WORDS[5:]) if longest else words(3 * number + part, 8) for part in range(3))
        row = {"prompt": prompt, "completion": f" {answers[0]}"}
        if trainer in ("dpo", "reward"):
            row = {"prompt": prompt, "chosen": f" {answers[0]}", "rejected": f" {answers[1]}"}
        if trainer in ("grpo", "rloo"):
            row = {"prompt": prompt}
        made.append(row | ({"label": number % 3 != 0} if trainer == "kto" else {}))
    return made[:6] if trainer in ("grpo", "rloo") else made


def responses(step: int) -> list[list[int]]:
    """Four responses to each of a step's two prompts: some end, others are cut at six tokens."""
    made = []
    for number in range(8):
        length = 1 + (3 * number + step) % 6
        tokens = [5 + word for word in drawn(100 + 10 * step + number, length, len(WORDS) - 5)]
        made.append(tokens if length == ONLINE["max_completion_length"] else [*tokens, 2])
    return made


def reward(completion_ids, **columns):
    """A number of a response's tokens; the test has the same."""
    return [sum(ids) % 7 / 2 for ids in completion_ids]


class Kept:
    """Keeps the losses of micro-batches, and takes given completions."""

    def training_step(self, *arguments, **options):
        loss = super().training_step(*arguments, **options)
        self.losses.append(float(loss))
        return loss

    def _generate_single_turn(self, prompt_ids, *more):
        tokens = responses(self.generated)
        self.generated += 1
        return tokens if isinstance(self, trl.RLOOTrainer) else (tokens, None)


class Log(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_log(self, args, state, control, logs=None, **more):
        if "grad_norm" in logs:
            self.steps.append(logs)


def plain(name: str) -> str:
    """A parameter's name without the marks of peft's model."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def trained(trainer: str, family: str, stated: dict) -> dict:
    """What a trainer makes of its rows with these options."""
    folder = make_formula_model(Path(mkdtemp()), family, scalar=trainer == "reward")
    auto = AutoModelForSequenceClassification if trainer == "reward" else AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<unk>"
    if "use_peft" in stated:
        adapter = make_formula_adapter(Path(mkdtemp()), folder, stated)
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    before = {name: values.detach().clone() for name, values in model.named_parameters() if values.requires_grad}
    kind, config = KINDS[trainer]
    online = trainer in ("grpo", "rloo")
    options = {**OPTIMIZER, **(ONLINE if online else {}), **stated}
    unlogged = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    in_order = {"train_sampling_strategy": "sequential"} if not online else {"shuffle_dataset": False}
    whole = {} if online else {"max_length": None}
    more = {"shuffle_dataset": False} if trainer == "sft" else {}
    of_trainer = {name: value for name, value in options.items() if name not in ADAPTER}
    args = config(output_dir=mkdtemp(), **unlogged, **in_order, **whole, **more, **of_trainer)
    given = {"reward_funcs": [reward]} if online else {}
    if trainer in ("dpo", "kto") and "use_peft" not in stated:
        given["ref_model"] = auto.from_pretrained(folder, dtype=torch.float32)
    log, data = Log(), Dataset.from_list(rows(trainer))
    kept = type(kind.__name__, (Kept, kind), {"losses": [], "generated": 0})
    run = kept(model=model, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[log], **given)
    run.train()
    each, after = args.gradient_accumulation_steps, model.state_dict()
    return {
        "trainer": trainer,
        "family": family,
        "options": options,
        "loss": [sum(run.losses[at : at + each]) for at in range(0, len(run.losses), each)],
        "grad_norm": [float(step["grad_norm"]) for step in log.steps],
        "learning_rate": [step["learning_rate"] for step in log.steps],
        "changes": {plain(name): round(change(plain(name), before[name], after[name]), 9) for name in before},
    }


def main() -> None:
    torch.set_num_threads(1)
    for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer):
        module.shuffle_sequence_dict = lambda rows: rows
    found = {
        "made by": f"tests/data/make_trl_training.py with trl {trl.__version__}",
        "rows": {trainer: rows(trainer) for trainer in KINDS},
        "responses": [responses(step) for step in range(3)],
        "cases": {name: trained(*case) for name, case in CASES.items()},
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
