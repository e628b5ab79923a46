"""A reward model: a sequence-classification model that grades responses in batches of similar length.

    conversations --> inputs --sorted by length--> batches of at most `max_batch` rows and `batch_tokens` tokens
                                                   --padded on the right, one forward pass each--> grades

The weights are read only from safetensors files. A batch that does not fit into a GPU's memory is split into halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.attention import choose_attention
from rollflow.tasks.policies.device import find_device
from rollflow.tasks.policies.tensors import silence_transformers
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.model.copies import Grade
from rollflow.tasks.scorers.model.inputs import Conversation, GraderInput, InputWriter

SAVE = "save the model again (save_pretrained)"
TRIED: Conversation = ([{"role": "user", "content": "What is the colour of snow?"}], "White.")
TRIED_BYTES = 2**28  # largest size, in bytes, of a reward model that is tested before a run starts
TRIED_TOKENS = 2048  # largest input limit, in tokens, at which an input of the full length is tested
SHOWN = 4  # largest number of labels or tensor names in one error message


class Classifier:
    """Grades responses with a reward model; only one thread at a time may use a `Classifier`."""

    def __init__(self, config: ModelReward, folder: Path, section: str = "reward", now: float = 0.0) -> None:
        """Load the model.

        Args:
            section: The config section that error messages name.
            now: The time that the chat template reads, in seconds since the Unix epoch.

        Raises:
            ConfigError: the reward model's folder cannot be used as the config section says.
        """
        torch.set_num_threads(config.cpus)
        self._config, self._section = config, section
        self._device = find_device() if config.gpus else torch.device("cpu")
        self._model = _load(config, folder, section).eval().to(self._device)
        self._label = find_label(config, self._model.config, section)
        self._writer = _open_writer(config, folder, self._model, section, now)
        self._pad = self._model.config.get_text_config().pad_token_id

    def grade(
        self, conversations: Sequence[Conversation], note: Callable[[int], None] = lambda count: None
    ) -> list[Grade]:
        """Return the grades of responses, in the order of the responses; call `note` with the number of graded
        responses after each batch.
        """
        grades, inputs = dict[int, Grade](), dict[int, GraderInput]()
        for place, conversation in enumerate(conversations):
            try:
                inputs[place] = self._writer.write(conversation)
            except ConfigError as error:  # raised if the chat template rejects the prompt
                grades[place] = Grade(math.nan, fault=str(error))
        for batch in self._batches(inputs):
            found = self._run([inputs[place] for place in batch])
            grades |= zip(batch, found, strict=True)
            note(len(batch))
        return [grades[place] for place in range(len(conversations))]

    def try_out(self) -> None:
        """Grade a short conversation. If the input limit is at most `TRIED_TOKENS` tokens, also grade an input of that
        length.

        Raises:
            ConfigError: the model cannot grade an input, or the grade is not a finite number.
        """
        try:
            [grade] = self.grade([TRIED])
        except Exception as error:  # noqa: BLE001 - an architecture's code may raise anything here
            raise _refusal(
                self._config, self._section, f"the reward model cannot score a text ({_first_line(error)})", SAVE
            ) from None
        if not math.isfinite(grade.raw):
            raise _refusal(self._config, self._section, grade.fault or f"the model computes {grade.raw}", SAVE)
        longest = self._writer.longest
        if longest is not None and longest <= TRIED_TOKENS:
            try:
                self.grade([(TRIED[0], "white " * longest)])
            except Exception as error:  # noqa: BLE001 - some architectures have fewer positions than their config says
                why = f"the model fails on an input of {longest} tokens ({_first_line(error)})"
                cure = f"set {self._section}.max_tokens to a smaller number"
                raise _refusal(self._config, self._section, why, cure) from None

    def _batches(self, inputs: Mapping[int, GraderInput]) -> Iterator[list[int]]:
        """Yield the indices of the inputs of each batch, shortest inputs first."""
        batch: list[int] = []
        for place in sorted(inputs, key=lambda place: len(inputs[place])):
            tokens = (len(batch) + 1) * len(inputs[place])
            if batch and (len(batch) == self._config.max_batch or tokens > self._config.batch_tokens):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _run(self, rows: Sequence[GraderInput]) -> list[Grade]:
        """Grade the inputs of a batch; if memory runs out, grade the halves of the batch one after the other."""
        try:
            return [Grade(raw, row.cut) for raw, row in zip(self._forward(rows), rows, strict=True)]
        except torch.OutOfMemoryError as error:
            fault = _first_line(error)
        torch.cuda.empty_cache()
        if len(rows) == 1:
            return [Grade(math.nan, rows[0].cut, fault)]
        half = len(rows) // 2
        return [*self._run(rows[:half]), *self._run(rows[half:])]

    @torch.inference_mode()
    def _forward(self, rows: Sequence[GraderInput]) -> list[float]:
        """Return the model's logit or probability for each input."""
        width = max(map(len, rows))
        columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
        columns["attention_mask"] = [[1] * len(row) for row in rows]
        fill = {"input_ids": self._pad or 0}
        padded = {
            name: torch.tensor([[*one, *[fill.get(name, 0)] * (width - len(one))] for one in column])
            for name, column in columns.items()
        }
        logits = self._model(**{name: tensor.to(self._device) for name, tensor in padded.items()}).logits.float()
        if self._label is None:
            return [float(one) for one in logits[:, 0].tolist()]
        several = self._model.config.problem_type == "multi_label_classification"
        chances = logits.sigmoid() if several else logits.softmax(-1)
        return [float(one) for one in chances[:, self._label].tolist()]


def check_model(config: ModelReward, folder: Path, section: str) -> None:
    """Check a reward model before a run, without loading a large model's weights.

    Raises:
        ConfigError: the reward model cannot be used; the message says what the user must change.
    """
    empty = _load(config, folder, section, empty=True)
    find_label(config, empty.config, section)
    _open_writer(config, folder, empty, section, 0.0).write(TRIED)
    if sum(tensor.nbytes for tensor in empty.parameters()) <= TRIED_BYTES:
        Classifier(config, folder, section).try_out()


def find_label(config: ModelReward, described: Any, section: str) -> int | None:
    """Return the index of the label whose probability is the score; None if the logit of the only label is the
    score.

    Raises:
        ConfigError: the model lacks the label that the config names, or has several labels and the config names none.
    """
    names = {str(name): int(number) for number, name in described.id2label.items()}
    if config.label is None and len(names) == 1:
        return None
    shown = ", ".join(list(names)[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    if config.label is None:
        cure = f"the model has {len(names)} labels ({shown}); name the label whose probability is the score"
        raise ConfigError(f"{section}.label is not set: {cure}")
    if len(names) == 1:
        cure = "the model has one label, whose logit is the score; remove the key"
        raise ConfigError(f"{section}.label = {config.label!r}: {cure}")
    if config.label not in names:
        raise ConfigError(f"{section}.label = {config.label!r}: the model has no such label; name one of {shown}")
    return names[config.label]


def _open_writer(config: ModelReward, folder: Path, model: Any, section: str, now: float) -> InputWriter:
    """Open the model's tokenizer, and check that the tokenizer fits the model."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    try:
        with silence_transformers():
            limit = InputWriter(folder, None, config.cut).limit
            longest = min((one for one in (config.max_tokens, context, limit) if one), default=None)
            writer = InputWriter(folder, longest, config.cut, now)
            writer.write(TRIED)
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain `Exception`s
        why = f"the model's tokenizer cannot be used ({_first_line(error)})"
        raise _refusal(config, section, why, "save the tokenizer again") from None
    if config.max_tokens and longest and config.max_tokens > longest:
        cure = f"the model reads at most {longest} tokens; choose {longest} or less"
        raise ConfigError(f"{section}.max_tokens = {config.max_tokens}: {cure}")
    rows = model.get_input_embeddings().weight.shape[0]
    if writer.largest_id >= rows:
        why = f"the tokenizer has a token with id {writer.largest_id}, and the model has only {rows} embedding rows"
        raise _refusal(config, section, why, "resize the model's embeddings (resize_token_embeddings)")
    if model.config.get_text_config().pad_token_id is None and config.max_batch > 1:
        cure = f"write pad_token_id into the model's config.json, or set {section}.max_batch = 1"
        raise _refusal(config, section, "the model has no padding token, so it cannot score a batch", cure)
    return writer


def _load(config: ModelReward, folder: Path, section: str, *, empty: bool = False) -> Any:
    """Load the reward model; with `empty`, do not load the values of the weights."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        with silence_transformers():
            described = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=described,
                dtype=getattr(torch, config.dtype),
                attn_implementation=choose_attention(described),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
                use_safetensors=True,
                **({"device_map": "meta"} if empty else {}),
            )
    except Exception as error:  # noqa: BLE001 - an architecture's code may raise anything here
        why = f"transformers cannot open it as a sequence-classification model ({_first_line(error)})"
        raise _refusal(config, section, why, "name a reward model, or save it again") from None
    wrong = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if wrong:
        shown = ", ".join(wrong[:SHOWN]) + (" and more" if len(wrong) > SHOWN else "")
        why = f"tensors of {type(model).__name__} are missing or have another shape: {shown}"
        raise _refusal(config, section, why, "name a model that was trained as a classifier")
    return model


def _refusal(config: ModelReward, section: str, why: str, cure: str) -> ConfigError:
    return ConfigError(f"{section}.path = {config.path!r}: {why}; {cure}")


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
