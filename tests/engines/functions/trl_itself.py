"""TRL's own GRPOTrainer plays an environment of `of_trl_environment.py` with scripted turns.

It needs TRL. Arguments: a class, and the turns as JSON. The model and the tokenizer are tiny, and the model says the
script. TRL makes the prompts, calls the tools, and asks for the reward. Prints the conversation and the reward as JSON.
"""

import json
import sys
from tempfile import TemporaryDirectory

import of_trl_environment
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from prefect_rlhf.engines.functions.signatures.tool_calls import calls_in

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer():
    """Return a tokenizer of bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", padding_side="left")
    fast.chat_template, fast.response_template = TEMPLATE, {}
    return fast


def parsed(tokenizer, ids, **_):
    """Return a turn as TRL's `parse_response` does for Hermes' format."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls_in(text, "hermes")]
    turn = {"role": "assistant", "content": text}
    return turn | ({"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {})


class Scripted(GRPOTrainer):
    """A trainer whose model says the script."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        turn, self.turn = self.turn, self.turn + 1
        ids = [*self.processing_class(TURNS[turn])["input_ids"], self.processing_class.eos_token_id]
        return [list(ids) for _ in prompt_ids], None

    def _tool_call_loop(self, prompts, *rest):
        asked = [message["content"] for message in prompts[0]]
        found = super()._tool_call_loop(prompts, *rest)
        self.seen |= {"prompt": asked, "messages": found[1][0]}
        return found

    def _calculate_rewards(self, *given):
        rewards = super()._calculate_rewards(*given)
        self.seen["reward"] = rewards[0].tolist()
        return rewards


NAME, TURNS = sys.argv[1], json.loads(sys.argv[2])
grpo_trainer.parse_response = parsed
torch.set_num_threads(1)
words = tokenizer()
shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=len(words), max_position_embeddings=4096))
rows = {"prompt": [[{"role": "user", "content": "count"}]] * 2, "answer": ["3"] * 2}
with TemporaryDirectory() as folder:
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=2048,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Scripted(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict(rows),
        processing_class=words,
        environment_factory=getattr(of_trl_environment, NAME),
    )
    trainer.turn, trainer.seen = 0, {}
    trainer.train()
sys.stdout.write("\n" + json.dumps(trainer.seen) + "\n")
