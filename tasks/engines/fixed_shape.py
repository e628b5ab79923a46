"""Samples batches of responses from a Hugging Face model, so that no response depends on other requests in its
batch.

The tokens and log-probs of a request depend, bit for bit, only on its prompt, max_new_tokens, temperature and seed, and
on the weights, the number of threads and the type of GPU.

Matrix kernels may round differently for different shapes, so every forward pass has one of two fixed shapes, prefill or
decode. Whether a token is processed in prefill or in decode depends only on its own request.

    prefill  P x C   chunk k of a row's known tokens holds its positions [k C, (k+1) C); short chunks are padded
    decode   R x 1   the newest token of each row; the results of idle rows are ignored

The attention spans S keys, where S depends only on the length of the request; keys beyond a row's position are masked.
The random number of a token depends only on the seed of the request and the position of the token. Tokens of a prefix
go through the same shapes as on the engine that sampled the prefix.

Random numbers come from CPU generators, also on a GPU.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from rollflow.storage.errors import Corrupt
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.changed_elements import load_changes
from rollflow.tasks.engines.runnable import find_hindrance
from rollflow.tasks.engines.stop_strings import StopWatch, watch_stops
from rollflow.tasks.policies.attention import choose_attention
from rollflow.tasks.policies.context import context_length
from rollflow.tasks.policies.device import find_device, fix_workspace, send, turn_off_cudnn_attention
from rollflow.tasks.policies.head import LMHead

SMALLEST_SPAN = 64  # smallest number of keys that a request's attention spans; doubled until the request fits
GROUP_BYTES = 2**32  # largest KV cache of a group of more than 16 requests on a GPU, in bytes
FEWEST = 16  # smallest number of requests that share one KV cache tensor on a GPU


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the two forward passes: R rows for decode, and P rows of C tokens each for prefill."""

    R: int
    P: int
    C: int


ON_CPU, ON_GPU = Shape(64, 16, 16), Shape(256, 64, 64)


def fit_rows(shape: Shape, row_bytes: int) -> int:
    """Return how many requests share a KV cache on a GPU: `shape.R`, halved until it fits into `GROUP_BYTES`."""
    rows = shape.R
    while rows > FEWEST and rows * row_bytes > GROUP_BYTES:
        rows //= 2
    return rows


@dataclass(eq=False, slots=True)
class RunningRow:
    """A running request: its known tokens, the number of tokens in the KV cache, and the log-probs."""

    request: GenerationRequest
    known: list[int]
    draws: Tensor
    watch: StopWatch
    fed: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Number of known tokens of the request that are not in the KV cache yet."""
        return len(self.known) - self.fed

    @property
    def prefilling(self) -> bool:
        return self.fed < self.request.prompt.length or self.pending > 1

    def take(self, token: int, logprob: float, version: int) -> int:
        """Append the next token of the prefix, or `token` after the prefix; return the appended token.

        The list `versions` grows last, because another thread may read the lists in `progress`.
        """
        position, prefix = len(self.versions), self.request.prefix
        if position < len(prefix):
            token, logprob, version = prefix.tokens[position], prefix.logprobs[position], prefix.versions[position]
        self.known.append(token)
        self.watch.feed(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        return token

    def append_old_prefix(self, version: int) -> None:
        """Append the first tokens of the prefix, sampled by older policy versions, so that prefill computes them."""
        versions = self.request.prefix.versions
        while len(self.versions) < len(versions) and versions[len(self.versions)] != version:
            self.take(0, 0.0, 0)

    def take_first(self, count: int) -> TokenSpan:
        """Return the first `count` tokens of the request's response."""
        start = self.request.prompt.length
        known = self.known[start : start + count]
        return TokenSpan.of(known, self.logprobs[:count], self.versions[:count])

    def progress(self) -> TokenSpan:
        """Return all tokens of the response except the newest one, which may end the response.

        Any thread may call `progress`, because the request's lists only grow.
        """
        return self.take_first(max(0, len(self.versions) - 1))

    def build_generation(self, ending: StopReason) -> Generation:
        return Generation(self.request.id, self.take_first(len(self.versions)), ending)


class AttentionRows:
    """Requests that share a KV cache, in which all rows have the same number of keys."""

    def __init__(self, config: Any, span: int, dtype: torch.dtype, device: torch.device, fixed: Shape) -> None:
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        row_shape = (config.num_key_value_heads, span, head_size)
        row_bytes = 2 * config.num_hidden_layers * math.prod(row_shape) * dtype.itemsize
        count = fit_rows(fixed, row_bytes) if device.type == "cuda" else fixed.R
        shape = (count, *row_shape)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.rows: list[RunningRow | None] = [None] * count

    @property
    def taken(self) -> list[tuple[int, RunningRow]]:
        return [(index, row) for index, row in enumerate(self.rows) if row is not None]


class AttentionCache:
    """KV cache that the model calls to store new keys and values, and to read keys and values."""

    def __init__(self, group: AttentionRows, into_N1: Tensor, positions_NC: Tensor, read_P: Tensor | None) -> None:
        """Prepare to write the new keys and values into the rows `into_N1`, and to attend to the rows `read_P`.

        If `read_P` is None, the forward pass attends to all rows of the KV cache.
        """
        self._group, self._into, self._positions, self._read = group, into_N1, positions_NC, read_P

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer; return all keys and values to attend to."""
        return self._store(self._group.keys[layer], keys), self._store(self._group.values[layer], values)

    def _store(self, state: Tensor, new: Tensor) -> Tensor:
        state[self._into, :, self._positions] = new[: len(self._into)].transpose(1, 2)
        return state if self._read is None else state[self._read]

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


class FixedShapeSampler:
    """Samples responses from a Hugging Face model; only one thread may use a sampler."""

    def __init__(self, policy_folder: Path, dtype: torch.dtype, slots: int, stop_ids: Iterable[int]) -> None:
        config = AutoConfig.from_pretrained(policy_folder)
        if why := find_hindrance(config):
            raise ValueError(
                f'the transformers engine cannot run the policy in {policy_folder}: {why}; set engine.kind = "vllm"'
            )
        self._config, self._folder = config, policy_folder
        attention = choose_attention(config) or "sdpa"
        self._device = find_device()
        self._shape = ON_CPU
        if self._device.type == "cuda":
            self._shape = ON_GPU
            fix_workspace()  # makes the engine use the same cuBLAS workspace as the learner
            turn_off_cudnn_attention()
        with no_init_weights():  # `load` loads the weights later
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        model.tie_weights()  # transformers ties weights only when it initialises them
        self._model = model.eval().to(self._device)
        self._adds_mask = attention == "eager"
        # Older runs may have recorded prompts that are longer than `context_length` allows.
        self._context = max(context_length(config.to_dict()), getattr(config, "max_position_embeddings", None) or 0)
        self._head = LMHead(self._model, judged=False)  # not tested yet, because the weights are loaded later
        self._dtype = dtype
        self._slots = slots
        self._stop_ids = frozenset(stop_ids)
        self._queue: deque[RunningRow] = deque()
        self._groups: dict[int, list[AttentionRows]] = {}  # number of keys in the KV cache -> groups of requests

    @property
    def busy(self) -> bool:
        return bool(self._queue) or any(group.taken for group in self._list_groups())

    def add(self, request: GenerationRequest) -> RunningRow:
        prompt = request.prompt.read_tokens("the transformers engine")
        needed = len(prompt) + request.max_new_tokens
        if not prompt or needed > self._context:
            raise ValueError(
                f"request {request.id} needs {needed} tokens for prompt and response, but the policy takes at "
                f"most {self._context}, and a prompt must have at least one token"
            )
        generator = torch.Generator().manual_seed(secrets.randbits(63) if request.seed is None else request.seed)
        draws = torch.rand(request.max_new_tokens, generator=generator, dtype=torch.float64)
        row = RunningRow(request, list(prompt), draws, watch_stops(request.stop, self._folder))
        self._queue.append(row)
        return row

    def abort(self, ids: Iterable[str] | None) -> list[Generation]:
        """Abort these requests, or all requests if `ids` is None; return the tokens generated so far."""
        wanted = None if ids is None else frozenset(ids)
        ended = [row for row in self._queue if wanted is None or row.request.id in wanted]
        self._queue = deque(row for row in self._queue if row not in ended)
        for group in self._list_groups():
            for index, row in group.taken:
                if wanted is None or row.request.id in wanted:
                    group.rows[index] = None
                    ended.append(row)
        return [row.build_generation(StopReason.ABORTED) for row in ended]

    def load(self, weights: Path, before: int = -1, after: int = -1) -> None:
        """Replace the weights of policy version `before` by those of version `after`. If the folder says which elements
        changed, only those are loaded. The KV cache of running requests is computed again in the next generation steps.
        """
        if not load_changes(dict(self._model.named_parameters()), weights, before, after):
            self._load_all(weights)
        for group in self._list_groups():
            for _, row in group.taken:
                row.fed = 0

    def _load_all(self, weights: Path) -> None:
        files = sorted(weights.glob("*.safetensors"))
        stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name not in stored or stored[name].shape != parameter.shape:
                    raise Corrupt(
                        f"the weights in {weights} must have a tensor {name} of shape {tuple(parameter.shape)}, "
                        "but have none"
                    )
                parameter.copy_(stored[name])

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        ids_T = torch.tensor(list(tokens), device=self._device)
        logits = self._model(ids_T[None]).logits[0, :-1].float()
        following = ids_T[1:].unsqueeze(-1)
        return tuple(torch.log_softmax(logits, -1).gather(-1, following).squeeze(-1).tolist())

    @torch.inference_mode()
    def step(self, version: int) -> list[Generation]:
        """Generate one token for every running request; return the responses that ended."""
        self._admit()
        ended: list[Generation] = []
        for group in self._list_groups():
            for _, row in group.taken:
                if row.fed == 0:
                    row.append_old_prefix(version)
            while waiting := [(index, row) for index, row in group.taken if row.prefilling]:
                ended += self._prefill(group, waiting[: self._shape.P], version)
            if running := group.taken:
                ended += self._decode(group, running, version)
        return ended

    def _list_groups(self) -> list[AttentionRows]:
        return [group for groups in self._groups.values() for group in groups]

    def _admit(self) -> None:
        """Start queued requests, first come, first served, until all slots are taken."""
        room = self._slots - sum(len(group.taken) for group in self._list_groups())
        while self._queue and room > 0:
            row = self._queue.popleft()
            span = self._compute_span(row.request)
            groups = self._groups.setdefault(span, [])
            group = next((group for group in groups if None in group.rows), None)
            if group is None:
                group = AttentionRows(self._config, span, self._dtype, self._device, self._shape)
                groups.append(group)
            group.rows[group.rows.index(None)] = row
            room -= 1

    def _compute_span(self, request: GenerationRequest) -> int:
        """Return the number of keys that a request needs in the KV cache: `SMALLEST_SPAN` times a power of two."""
        chunk = self._shape.C
        needed = -(-(request.prompt.length + request.max_new_tokens) // chunk) * chunk
        span = SMALLEST_SPAN
        while span < needed:
            span *= 2
        return span

    def _prefill(self, group: AttentionRows, rows: list[tuple[int, RunningRow]], version: int) -> list[Generation]:
        """Process one chunk of known tokens for each request; after its last chunk, sample the next token."""
        P, C = self._shape.P, self._shape.C
        tokens_PC = torch.zeros(P, C, dtype=torch.long)
        starts_P = torch.zeros(P, dtype=torch.long)
        last_P = torch.zeros(P, dtype=torch.long)
        for slot, (_, row) in enumerate(rows):
            chunk = row.known[row.fed : row.fed + C]
            tokens_PC[slot, : len(chunk)] = torch.tensor(chunk)
            starts_P[slot], last_P[slot] = row.fed, len(chunk) - 1
            row.fed += len(chunk)
        read_P = torch.zeros(P, dtype=torch.long)
        read_P[: len(rows)] = torch.tensor([index for index, _ in rows])
        positions_PC = starts_P[:, None] + torch.arange(C)
        tokens_PC, positions_PC, read_P, last_P = self._to_device(tokens_PC, positions_PC, read_P, last_P)
        cache = AttentionCache(group, read_P[: len(rows), None], positions_PC[: len(rows)], read_P)
        hidden_PCH = self._forward(group, tokens_PC, positions_PC, cache)
        done = [(slot, index, row) for slot, (index, row) in enumerate(rows) if row.pending == 0]
        slots_P = torch.arange(P, device=self._device)
        return self._sample(group, hidden_PCH[slots_P, last_P], done, version) if done else []

    def _decode(self, group: AttentionRows, rows: list[tuple[int, RunningRow]], version: int) -> list[Generation]:
        R = len(group.rows)
        tokens_R1 = torch.zeros(R, 1, dtype=torch.long)
        positions_R1 = torch.zeros(R, 1, dtype=torch.long)
        indices_N = torch.tensor([index for index, _ in rows])
        tokens_R1[indices_N, 0] = torch.tensor([row.known[-1] for _, row in rows])
        positions_R1[indices_N, 0] = torch.tensor([row.fed for _, row in rows])
        tokens_R1, positions_R1, indices_N = self._to_device(tokens_R1, positions_R1, indices_N)
        cache = _DecodeWrites(group, indices_N, positions_R1[indices_N])
        hidden_R1H = self._forward(group, tokens_R1, positions_R1, cache)
        for _, row in rows:
            row.fed += 1
        return self._sample(group, hidden_R1H[:, 0], [(index, index, row) for index, row in rows], version)

    def _to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copy these tensors to the model's device."""
        return [send(tensor, self._device) for tensor in tensors]

    def _forward(self, group: AttentionRows, tokens: Tensor, positions: Tensor, cache: AttentionCache) -> Tensor:
        span = group.keys[0].shape[2]
        mask = torch.arange(span, device=self._device) <= positions[:, None, :, None]
        if self._adds_mask:  # this model adds a float mask to the attention scores
            least = torch.finfo(self._dtype).min
            mask = torch.zeros(mask.shape, dtype=self._dtype, device=self._device).masked_fill_(~mask, least)
        output = self._model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _sample(
        self, group: AttentionRows, hidden: Tensor, rows: list[tuple[int, int, RunningRow]], version: int
    ) -> list[Generation]:
        """Sample a token for each row by inverse CDF, or take the most probable token at temperature 0.

        Each element of `rows` has the index of a request in `hidden`, its index in the KV cache, and the request.
        """
        temperatures = torch.ones(len(hidden), 1)
        draws = torch.zeros(len(hidden), 1, dtype=torch.float64)
        greedy = torch.zeros(len(hidden), 1, dtype=torch.bool)
        for slot, _, row in rows:
            greedy[slot] = row.request.temperature == 0
            temperatures[slot] = row.request.temperature or 1.0
            draws[slot] = row.draws[len(row.logprobs)]
        temperatures, draws, greedy = self._to_device(temperatures, draws, greedy)
        logprobs_V = torch.log_softmax(self._head(hidden).float() / temperatures, -1)
        cumulated_V = logprobs_V.double().exp().cumsum(-1)
        tokens = torch.searchsorted(cumulated_V, draws * cumulated_V[:, -1:], right=True)
        tokens.clamp_(max=logprobs_V.shape[-1] - 1)
        tokens = torch.where(greedy, logprobs_V.argmax(-1, keepdim=True), tokens)
        chosen = zip(tokens[:, 0].tolist(), logprobs_V.gather(-1, tokens)[:, 0].tolist(), strict=True)
        outcome = list(chosen)
        ended = []
        for slot, index, row in rows:
            ending = self._find_ending(row, row.take(*outcome[slot], version))
            if ending is not None:
                group.rows[index] = None
                ended.append(row.build_generation(ending))
        return ended

    def _find_ending(self, row: RunningRow, token: int) -> StopReason | None:
        if token in self._stop_ids or row.watch.stopped:
            return StopReason.STOP
        return StopReason.LENGTH if len(row.logprobs) == row.request.max_new_tokens else None


class _DecodeWrites(AttentionCache):
    """KV cache for decoding, which writes only the rows of the decoded requests."""

    def __init__(self, group: AttentionRows, into_N: Tensor, positions_N1: Tensor) -> None:
        super().__init__(group, into_N, positions_N1[:, 0], None)

    def _store(self, state: Tensor, new: Tensor) -> Tensor:
        state[self._into, :, self._positions] = new[self._into, :, 0]
        return state
