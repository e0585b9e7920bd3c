"""A language model that says what the prompt tells it to, for a real SGLang server without a GPU.

Nothing is computed: for every position the logits are one-hot on a token that is known beforehand.
HTTP server, scheduler, KV pool, radix cache, sampler, detokenizer, parsers, metrics and log are SGLang's own.

Directives, in the last user message of a chat:
  [[script NAME]]  the reply of that name in scripts.json
  [[say]]TEXT      the rest of the message, word for word
  [[len N]]        N tokens of filler
  [[sleep MS]]     that much longer per decode step while this request runs
  [[crash]]        an exception in the scheduler
  [[hang S]]       the scheduler blocks for S seconds

Without one: the reply that SCRIPTED_ANSWERS has for the first of its keys that stands in the message. That
is a JSON file, read again for every request. A reply that begins with [[nan]] has NaN for its logits, one
that has [[sleep MS]] in it is slow.

Environment: SCRIPTED_FILE (scripts.json), SCRIPTED_ANSWERS, SCRIPTED_STEP_MS (per decode step),
SCRIPTED_PREFILL_MS_PER_KTOK, SCRIPTED_LOAD_S (how long the weights take),
SCRIPTED_WARM_UP_S (how much longer the very first step takes),
SCRIPTED_DRAFT_ERR (0..1, share of the draft model's tokens that are wrong).
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import sgl_kernel
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from tokenizers import Tokenizer
from torch import nn

FILLER = "the quick brown fox jumps over the lazy dog "
CRASH = "scripted crash: CUDA error: an illegal memory access was encountered"

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.S)
_THOUGHT = re.compile(r"^<think>.*?</think>\s*", re.S)

STEP_S = float(os.environ.get("SCRIPTED_STEP_MS", "0")) / 1e3
PREFILL_S_PER_TOKEN = float(os.environ.get("SCRIPTED_PREFILL_MS_PER_KTOK", "0")) / 1e6
LOAD_S = float(os.environ.get("SCRIPTED_LOAD_S", "0"))
WARM_UP_S = float(os.environ.get("SCRIPTED_WARM_UP_S", "0"))
DRAFT_ERROR = float(os.environ.get("SCRIPTED_DRAFT_ERR", "0.3"))


class Plan:
    """What one request will say: ``reply[i]`` stands at position ``start + i``; None is endless filler."""

    def __init__(
        self,
        start: int,
        reply: list[int] | None,
        filler: list[int],
        sleep_s: float = 0.0,
        broken: bool = False,
    ) -> None:
        self.start = start
        self.reply = reply
        self.filler = filler
        self.sleep_s = sleep_s
        self.broken = broken

    def token(self, position: int) -> int:
        if self.broken:
            return NAN
        index = max(0, position - self.start)
        if self.reply is None:
            return self.filler[index % len(self.filler)]
        return self.reply[min(index, len(self.reply) - 1)]


#: Stands for a token whose logits are NaN.
NAN = -1

#: By the request's row in the KV pool. The target model fills it, a draft model in the same process reads it.
PLANS: dict[int, Plan] = {}


class Script:
    """Turns the tokens of a prompt into the plan of its reply."""

    def __init__(self, model_directory: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(model_directory) / "tokenizer.json"))
        self.filler = self._encode(FILLER)
        self._header = self._encode("<|im_start|>assistant\n")
        self._no_thinking = self._encode("<think>\n\n</think>\n\n")
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._replies = json.loads(Path(os.environ["SCRIPTED_FILE"]).read_text())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def plan(self, ids: list[int]) -> Plan:
        header = self._last_header(ids)
        if header is None:
            return Plan(len(ids), None, self.filler)
        start = header + len(self._header)
        silent = ids[start : start + len(self._no_thinking)] == self._no_thinking
        turns = _TURN.findall(self._tokenizer.decode(ids[:header], skip_special_tokens=False))
        user = next((text for role, text in reversed(turns) if role == "user"), "")
        reply = self._after_tool(turns) or self._reply(user)
        said = reply if isinstance(reply, str) else ""
        broken = said.startswith("[[nan]]")
        slow = re.search(r"\[\[sleep (\d+)\]\]", user + said)
        if isinstance(reply, str):
            reply = self._encode(_THOUGHT.sub("", reply) if silent else reply)
        if silent:
            start += len(self._no_thinking)
        return Plan(start, [*reply, self._end], self.filler, int(slow[1]) / 1e3 if slow else 0.0, broken)

    def _last_header(self, ids: list[int]) -> int | None:
        """Where the assistant's turn opens; None in a raw prompt, or a chunk that ends before it."""
        length = len(self._header)
        for index in range(len(ids) - length, -1, -1):
            if ids[index : index + length] == self._header:
                return index
        return None

    def _after_tool(self, turns: list[tuple[str, str]]) -> str | None:
        if not turns or turns[-1][0] != "tool":
            return None
        return "<think>The tool answered.</think>Done: " + turns[-1][1][:80]

    def _reply(self, user: str) -> str | list[int]:
        if "[[say]]" in user:
            return user.split("[[say]]", 1)[1]
        if named := re.search(r"\[\[script (\S+?)\]\]", user):
            return self._replies[named[1]]
        if length := re.search(r"\[\[len (\d+)\]\]", user):
            count = int(length[1])
            return (self.filler * (count // len(self.filler) + 1))[:count]
        if "[[crash]]" in user:
            raise RuntimeError(CRASH)
        if hang := re.search(r"\[\[hang (\d+)\]\]", user):
            time.sleep(int(hang[1]))
            return "awake"
        for part, answer in self._answers().items():
            if part in user:
                return answer
        return "<think>Nothing scripted.</think>You said: " + user[:200]

    def _answers(self) -> dict[str, str]:
        file = os.environ.get("SCRIPTED_ANSWERS")
        return json.loads(Path(file).read_text()) if file else {}


class ScriptedForCausalLM(nn.Module):
    """The target model. Hidden states are one-hot over the vocabulary, and the head is the identity."""

    is_draft = False

    def __init__(self, config, quant_config=None, prefix="") -> None:
        super().__init__()
        if config.hidden_size != config.vocab_size:
            raise ValueError("one-hot hidden states need hidden_size == vocab_size")
        self.config, self.quant_config = config, quant_config
        self.start_layer, self.end_layer = 0, config.num_hidden_layers
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config)
        self.script = Script(config._name_or_path)
        #: The token id at every KV slot: a request's whole text can be read back from the cache.
        self.store: torch.Tensor | None = None
        time.sleep(LOAD_S)  # between the log lines "Load weight begin" and "Load weight end"

    def load_weights(self, weights) -> None:
        for _ in weights:
            pass

    def get_embed_and_head(self):
        return self.embed_tokens.weight, self.lm_head.weight

    def set_embed_and_head(self, embed, head) -> None:
        pass

    def get_input_embeddings(self):
        return self.embed_tokens

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        if self.store is None:
            self._prepare()
            time.sleep(WARM_UP_S)
        slots = forward_batch.out_cache_loc
        if slots is not None and slots.numel() == input_ids.shape[0]:
            self.store[slots.long()] = input_ids.long()
        mode = forward_batch.forward_mode
        extends = mode.is_extend(include_draft_extend_v2=True) and not mode.is_target_verify()
        if forward_batch.extend_seq_lens is not None and extends:
            following = self._extend(input_ids, positions, forward_batch)
        else:
            following = self._decode(positions, forward_batch)
        hidden = self._one_hot(self._with_mistakes(following, positions))
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    @torch.no_grad()
    def _prepare(self) -> None:
        """At the first forward: whatever the loader wrote into the weights, they are the identity now."""
        for module in (self.lm_head, self.embed_tokens):
            first = module.shard_indices.org_vocab_start_index  # of this TP rank's rows
            rows = torch.arange(module.shard_indices.org_vocab_end_index - first)
            module.weight.zero_()
            module.weight[rows, rows + first] = 30.0
        if not self.is_draft:
            sgl_kernel.KV_MOVE_HOOKS.append(self._move)
        self.store = torch.zeros(int(get_token_to_kv_pool().size) + 4096, dtype=torch.int64)

    def _move(self, target, source) -> None:
        self.store[target.long()] = self.store[source.long()].clone()

    def _extend(self, input_ids, positions, forward_batch) -> list[int]:
        """The token after each position of a prefill, or of a draft model's catching up."""
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.extend_seq_lens.tolist()
        prefill = forward_batch.forward_mode.is_extend()
        given, where = input_ids.tolist(), positions.tolist()
        following: list[int] = []
        for row, length in zip(rows, lengths, strict=True):
            begin = len(following)
            if prefill and not self.is_draft and length:
                PLANS[row] = self.script.plan(self._tokens_so_far(row, where[begin + length - 1] + 1))
            plan = PLANS.get(row) or Plan(0, None, self.script.filler)
            for index in range(begin, begin + length):
                last = index == begin + length - 1
                if last or not prefill:
                    following.append(plan.token(where[index] + 1 + self._shift))
                else:
                    following.append(given[index + 1])
        if not self.is_draft:
            time.sleep(PREFILL_S_PER_TOKEN * len(given))
        return following + [0] * (len(given) - len(following))

    def _decode(self, positions, forward_batch) -> list[int]:
        """The token after each position: one per request, or several while drafts are verified."""
        rows = forward_batch.req_pool_indices.tolist()
        where = positions.tolist()
        if not rows or not where:
            return [0] * len(where)
        per_row = len(where) // len(rows)
        if not self.is_draft:
            time.sleep(max([STEP_S, *(PLANS[row].sleep_s for row in rows)]))
        return [
            PLANS[rows[index // per_row]].token(position + 1 + self._shift)
            for index, position in enumerate(where)
        ]

    def _tokens_so_far(self, row: int, end: int) -> list[int]:
        return self.store[get_req_to_token_pool().req_to_token[row, :end].long()].tolist()

    @property
    def _shift(self) -> int:
        """A draft worker's tokens stand one position earlier than the target's."""
        return 1 if self.is_draft else 0

    def _with_mistakes(self, following: list[int], positions) -> torch.Tensor:
        tokens = torch.tensor(following, dtype=torch.long)
        if not self.is_draft or not following:
            return tokens
        wrong = ((positions.long() * 2654435761) % 1000) < int(DRAFT_ERROR * 1000)  # the same in every run
        return torch.where(wrong, (tokens + 7) % self.config.vocab_size, tokens)

    def _one_hot(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(len(tokens), self.config.hidden_size, dtype=self.lm_head.weight.dtype)
        hidden[torch.arange(len(tokens)), tokens.clamp(min=0)] = 1.0
        hidden[tokens == NAN] = float("nan")
        return hidden


class ScriptedDraftForCausalLM(ScriptedForCausalLM):
    """The draft model for ``--speculative-algorithm STANDALONE``: the same script, sometimes wrong."""

    is_draft = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _lend_draft_backend()


def _lend_draft_backend() -> None:
    """SGLang has no draft attention backend for torch_native; intel_amx's can be built, and is never run."""
    create = DraftBackendFactory._create_backend
    if getattr(create, "lent", False):
        return

    def lent(self, name, backends, error, stamps_children=False):
        backends = {**backends, "torch_native": backends["intel_amx"]}
        return create(self, name, backends, error, stamps_children)

    lent.lent = True
    DraftBackendFactory._create_backend = lent


EntryClass = [ScriptedForCausalLM, ScriptedDraftForCausalLM]
