"""The scorer `model`: batches, cuts, labels and inputs are compared with transformers, and a model may fail."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rollflow.flows.config import load_recipe, parse_config
from rollflow.flows.keepalive.gpus import GpuShares, divide_gpus
from rollflow.flows.keepalive.placement import needed_cpus
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.records import Outcome
from rollflow.tasks.run.config_changes import explain_fixed
from rollflow.tasks.run.reward_models import check_models, check_pinned, load_model
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.model.classifier import Classifier, check_model
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.model.copies import Grade, ModelAway, ModelCopies
from rollflow.tasks.scorers.model.inputs import Conversation, InputWriter
from rollflow.tasks.scorers.model.scorer import ModelScorer
from tests.support.refused import refused
from tests.support.reward_models import make_reward_model
from tests.support.small_run import make_policy, prepare_small

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
TEXTS = [*("2", "It is 2.", "", "3 " * 20, "x" * 300, "two\n\n2", "a", "1 + 1 = 2"), "7" * 60]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with one label."""
    return make_reward_model(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with three labels."""
    return make_reward_model(tmp_path_factory.mktemp("three"), labels=("bad", "fair", "good"))


def config_of(folder: Path, **keys: Any) -> ModelReward:
    return ModelReward(path=str(folder), **keys)


def raw(classifier: Classifier, texts: Sequence[str]) -> list[float]:
    return [grade.raw for grade in classifier.grade([(CHAT, text) for text in texts])]


def plain_logits(folder: Path, text: str) -> torch.Tensor:
    """Compute the logits of one response as transformers does, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": text}], tokenize=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokenizer(rendered, add_special_tokens=False).input_ids])).logits[0]
    return found


@pytest.mark.parametrize("keys", [{}, {"max_batch": 3}, {"batch_tokens": 150}, {"max_batch": 1}])
def test_reward_model_scores_do_not_depend_on_batching(one: Path, keys: dict[str, int]) -> None:
    texts = TEXTS * 2
    random.Random(0).shuffle(texts)
    alone = Classifier(config_of(one), one)
    single = [raw(alone, [text])[0] for text in texts]
    assert raw(Classifier(config_of(one, **keys), one), texts) == pytest.approx(single, abs=1e-5)
    assert len({round(value, 3) for value in single}) > len(TEXTS) / 2


def test_reward_model_batches_have_similar_lengths(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, shapes = Classifier(config_of(one, max_batch=4, batch_tokens=200), one), list[tuple[int, int]]()
    forward = classifier._forward

    def noted(rows: Any) -> list[float]:
        shapes.append((len(rows), max(map(len, rows))))
        return forward(rows)

    monkeypatch.setattr(classifier, "_forward", noted)
    raw(classifier, TEXTS)
    assert sum(count for count, _ in shapes) == len(TEXTS)
    assert all(count <= 4 and (count == 1 or count * width <= 200) for count, width in shapes)
    assert [width for _, width in shapes] == sorted(width for _, width in shapes)


@pytest.mark.parametrize("side", ["left", "right"])
def test_reward_model_score_is_the_logit_of_transformers(tmp_path: Path, side: str) -> None:
    folder = make_reward_model(tmp_path)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"padding_side": side}))
    texts = ["2", "It is 2.", "1 + 1 = 2"]
    expected = [float(plain_logits(folder, text)[0]) for text in texts]
    assert raw(Classifier(config_of(folder), folder), texts) == pytest.approx(expected, abs=1e-5)


def test_reward_is_the_probability_of_the_named_label(three: Path) -> None:
    expected = plain_logits(three, "2").softmax(-1).tolist()
    for number, label in enumerate(("bad", "fair", "good")):
        found = raw(Classifier(config_of(three, label=label), three), ["2", "3 " * 20])
        assert found[0] == pytest.approx(expected[number], abs=1e-5)


def test_multi_label_model_gives_independent_probabilities(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path, labels=("a", "b"), problem_type="multi_label_classification")
    expected = plain_logits(folder, "2").sigmoid().tolist()
    assert raw(Classifier(config_of(folder, label="b"), folder), ["2"]) == pytest.approx([expected[1]], abs=1e-5)


COUNTED = " ".join(map(str, range(60)))


def test_too_long_reward_model_input_is_cut_at_the_named_end(one: Path) -> None:
    whole = InputWriter(one, None, "start").write((CHAT, COUNTED)).columns["input_ids"]
    start, end = InputWriter(one, 50, "start"), InputWriter(one, 50, "end")
    assert start.write((CHAT, COUNTED)) == ({"input_ids": whole[-50:]}, len(whole) - 50)
    assert end.write((CHAT, COUNTED)) == ({"input_ids": whole[:50]}, len(whole) - 50)
    [grade] = Classifier(config_of(one, max_tokens=50), one).grade([(CHAT, COUNTED)])
    assert grade.cut == len(whole) - 50


def test_model_without_chat_template_reads_prompt_and_response(tmp_path: Path) -> None:
    """The longer one of the two texts is cut."""
    folder = make_reward_model(tmp_path, template="")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt, response = tokenizer("Be brief.\nWhat is 1 + 1?").input_ids, tokenizer(COUNTED).input_ids
    whole, start, end = (
        InputWriter(folder, longest, cut).write((CHAT, COUNTED))  # type: ignore[arg-type]
        for longest, cut in ((None, "start"), (50, "start"), (50, "end"))
    )
    rest = 50 - len(prompt)
    assert whole == ({"input_ids": [*prompt, *response]}, 0)
    assert start == ({"input_ids": [*prompt, *response[-rest:]]}, len(response) - rest)
    assert end == ({"input_ids": [*prompt, *response[:rest]]}, len(response) - rest)


@pytest.mark.parametrize("template", [None, ""])
def test_reward_model_input_has_the_tokenizers_segments(tmp_path: Path, template: str | None) -> None:
    """A BERT model without segment ids fails, or reads both texts as one."""
    folder = make_reward_model(tmp_path, **({} if template is None else {"template": template}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | names))
    columns = InputWriter(folder, 50, "start").write((CHAT, COUNTED)).columns
    expected = {0} if template is None else {0, 1}
    assert len(columns["token_type_ids"]) == len(columns["input_ids"]) == 50
    assert set(columns["token_type_ids"]) == expected


def test_reward_model_that_fails_on_long_inputs_is_refused(tmp_path: Path) -> None:
    """Otherwise the first long response would end the model's actor, again and again.

    RoBERTa cannot use two of the positions that its config counts.
    """
    folder = make_reward_model(tmp_path, template="")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    described = RobertaConfig(vocab_size=320, max_position_embeddings=64, num_labels=1, pad_token_id=1, **shape)
    RobertaForSequenceClassification(described).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"fails on an input of 64 tokens .*; set reward\.max_tokens to a smaller"):
        check_model(config_of(folder), folder, "reward")
    check_model(config_of(folder, max_tokens=62), folder, "reward")


def test_response_cannot_inject_special_tokens_into_the_model(one: Path) -> None:
    tokenizer, writer = AutoTokenizer.from_pretrained(one), InputWriter(one, None, "start")
    ids = writer.write((CHAT, "2<|end|><|pad|>")).columns["input_ids"]
    end, pad = tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>"])
    assert (ids.count(end), ids.count(pad)) == (len(CHAT) + 1, 0)
    assert tokenizer.decode(ids).endswith("<|assistant|>2<|end|><|pad|><|end|>")


class Crowded(Classifier):
    """A classifier on a device with too little memory for more than `room` rows."""

    room = 2

    def _forward(self, rows: Any) -> list[float]:
        if len(rows) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return super()._forward(rows)


def test_batch_that_exceeds_gpu_memory_is_scored_in_halves(one: Path) -> None:
    assert raw(Crowded(config_of(one), one), TEXTS) == pytest.approx(
        raw(Classifier(config_of(one), one), TEXTS), abs=1e-5
    )


def test_response_that_exceeds_gpu_memory_is_unjudged(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crowded, "room", 0)
    [grade] = Crowded(config_of(one), one).grade([(CHAT, "2")])
    assert math.isnan(grade.raw)
    assert grade.fault == "out of memory"


# --- the scorer, on a virtual clock -----------------------------------------------------------------------------------


class Copies(ModelCopies):
    """Copies that grade a response by its number, and behave as `plan` says, call by call."""

    def __init__(self, *plan: str, dead: Sequence[int] = (), seconds: float = 1.0) -> None:
        self._plan, self._dead, self._seconds = list(plan), dead, seconds
        self.calls: list[int] = []  # number of responses of each call

    async def start(self) -> None:
        pass

    async def wait_ready(self, number: int) -> None:
        if number in self._dead:
            raise ModelAway("the node is gone")

    async def grade(self, number: int, conversations: Sequence[Conversation]) -> list[Grade]:
        self.calls.append(len(conversations))
        await asyncio.sleep(self._seconds)
        match self._plan.pop(0) if self._plan else "":
            case "away":
                raise ModelAway("the actor was killed")
            case "error":
                raise RuntimeError("CUDA error")
            case "nan":
                return [Grade(math.nan)] * len(conversations)
            case "fault":
                return [Grade(math.nan, fault="out of memory")] * len(conversations)
        return [Grade(float(response)) for _, response in conversations]


def score_all(copies: Copies, count: int = 6, **keys: Any) -> tuple[list[Score], float]:
    """Score the responses "0", "1", ... and return the scores, and the seconds until the last one."""

    async def main() -> tuple[list[Score], float]:
        scorer = ModelScorer(ModelReward(path="x", **keys), lambda tokens, special: str(tokens[0]), copies)
        await scorer.start()
        try:
            requests = [ScoreRequest([number], {}, messages=CHAT) for number in range(count)]
            return await scorer.score(requests), asyncio.get_running_loop().time()
        finally:
            await scorer.close()

    return run_virtual(main())


def test_reward_model_score_is_scaled_before_its_threshold() -> None:
    found, _ = score_all(Copies(), 4, scale=0.5, offset=-0.5, correct_from=0.5)
    assert [score.value for score in found] == [-0.5, 0.0, 0.5, 1.0]
    assert [score.outcome for score in found] == ["wrong", "wrong", "correct", "correct"]
    assert found[3].reason == "logit 3"


def test_format_penalty_applies_to_a_reward_model() -> None:
    found, _ = score_all(Copies(), 2, format={"pattern": "0", "penalty": 0.5})
    assert [score.value for score in found] == [0.0, 0.5]
    assert found[1].parts == {"answer": 1.0, "format": -0.5}


def test_length_penalty_applies_to_a_reward_model() -> None:
    found, _ = score_all(Copies(), 2, length_penalty={"start": 0, "full": 1, "penalty": 0.5})
    assert [score.value for score in found] == [-0.5, 0.5]
    assert found[1].parts == {"answer": 1.0, "length_penalty": -0.5}


@pytest.mark.parametrize("plan", [["away"], ["error"], ["away", "error", "away"]])
def test_failed_reward_model_call_is_retried(plan: list[str]) -> None:
    copies = Copies(*plan)
    found, _ = score_all(copies)
    assert [score.value for score in found] == [0, 1, 2, 3, 4, 5]
    assert copies.calls == [6] * (len(plan) + 1)


def test_dead_reward_model_leaves_responses_unjudged() -> None:
    found, seconds = score_all(Copies(dead=[0]), deadline_seconds=30)
    assert {score.outcome for score in found} == {Outcome.UNJUDGED}
    assert found[0].reason == "the reward model gave no score for 30 s: the node is gone"
    assert 30 <= seconds < 33


def test_second_reward_model_copy_scores_if_the_first_is_dead() -> None:
    found, seconds = score_all(Copies(dead=[1]), workers=2, deadline_seconds=30)
    assert [score.value for score in found] == [0, 1, 2, 3, 4, 5]
    assert seconds < 30


def test_slow_reward_model_leaves_no_response_unjudged() -> None:
    found, seconds = score_all(Copies(seconds=50), 20, deadline_seconds=10, max_batch=1)
    assert [score.value for score in found] == list(range(20))
    assert seconds == 50 * 5


@pytest.mark.parametrize(("plan", "why"), [("nan", "the logit is nan"), ("fault", "out of memory")])
def test_nan_score_of_a_reward_model_leaves_it_unjudged(plan: str, why: str) -> None:
    found, _ = score_all(Copies(plan), 1)
    assert found[0].outcome is Outcome.UNJUDGED
    assert found[0].reason == f"the reward model gave no number: {why}"


class OddCopies(Copies):
    """Copies whose number for the response "7" is NaN; call by call, they may fail or give no response a number."""

    async def grade(self, number: int, conversations: Sequence[Conversation]) -> list[Grade]:
        grades = await super().grade(number, conversations)
        odd = [response == "7" for _, response in conversations]
        return [Grade(math.nan) if is_odd else grade for is_odd, grade in zip(odd, grades, strict=True)]


def score_in_turn(copies: Copies, calls: Sequence[Sequence[int]], **keys: Any) -> list[Score]:
    """Score the responses of each call, one call after another; return the last score of each call."""

    async def main() -> list[Score]:
        scorer = ModelScorer(ModelReward(path="x", **keys), lambda tokens, special: str(tokens[0]), copies)
        await scorer.start()
        try:
            return [
                (await scorer.score([ScoreRequest([number], {}, messages=CHAT) for number in call]))[-1]
                for call in calls
            ]
        finally:
            await scorer.close()

    return run_virtual(main())


@pytest.mark.parametrize(
    ("before", "call", "graded"),
    [([], [1, 7], [2, 2, 2]), ([[3], [1]], [7], [1, 1, 1, 1, 1, 1, 1, 1])],
    ids=["together", "alone"],
)
def test_response_that_alone_gets_nan_scores_lowest(
    before: list[list[int]], call: list[int], graded: list[int]
) -> None:
    """Otherwise the policy could learn to stay unjudged; and a score of 0 would be better than most logits. If the
    response is alone, its copy grades an earlier response again.
    """
    copies = OddCopies()
    found = score_in_turn(copies, [*before, call, call, call], scale=-1.0, judge_tries=3)[-3:]
    assert [score.outcome for score in found] == [Outcome.UNJUDGED, Outcome.UNJUDGED, Outcome.UNPARSABLE]
    assert found[-1].value == (-3.0 if before else -1.0)
    assert "the logit is nan, 3 times or more, while it gave other responses a number" in found[-1].reason
    assert copies.calls == graded


@pytest.mark.parametrize(
    "plan", [["nan"] * 20, ["", *["nan"] * 20], ["", *["fault"] * 20]], ids=["new", "broken", "no memory"]
)
def test_broken_reward_model_leaves_responses_unjudged(plan: list[str]) -> None:
    """The model gives no response a number, or it never graded one, so the cause is not a response."""
    found = score_in_turn(OddCopies(*plan), [[1], [7], [7], [7], [7], [7]], judge_tries=2)
    assert [score.outcome for score in found[1:]] == [Outcome.UNJUDGED] * 5


def test_failed_control_call_of_a_reward_model_is_repeated() -> None:
    copies = OddCopies("", "", "away")
    found = score_in_turn(copies, [[1], [7], [7]], judge_tries=2)
    assert [score.outcome for score in found[1:]] == [Outcome.UNJUDGED, Outcome.UNPARSABLE]
    assert copies.calls == [1, 1, 1, 1, 1, 1, 1]


# --- refused before the run, and pinned in the run --------------------------------------------------------------------


def tree_of(policy: str, **reward: Any) -> dict[str, Any]:
    return {"policy": {"path": policy}, "reward": {"kind": "model", **reward}}


def drop(folder: Path, name: str) -> None:
    (folder / name).unlink()


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def edit_config(folder: Path, **keys: Any) -> None:
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | keys))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no folder": (lambda folder: None, {"path": "./nowhere"}, r"reward\.path = '.*nowhere': there is no such folder"),
    "pickle": (pickle_weights, {}, r"reward\.path = .* has no weights in safetensors format"),
    "no tokenizer": (lambda folder: drop(folder, "tokenizer.json"), {}, r"reward\.path = .* has no tokenizer\.json"),
    "no config": (lambda folder: drop(folder, "config.json"), {}, r"reward\.path = .* has no config\.json"),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"),
        {},
        "transformers cannot open it as a sequence-classification model",
    ),
    "no label": (lambda folder: None, {"label": "good"}, r"reward\.label = 'good': the model has one label"),
    "no padding": (lambda folder: edit_config(folder, pad_token_id=None), {}, r"set reward\.max_batch = 1"),
    "too long": (lambda folder: None, {"max_tokens": 500}, r"reward\.max_tokens = 500: the model reads at most 128"),
    "few rows": (lambda folder: edit_config(folder, vocab_size=100), {}, "have another shape: model.embed_tokens"),
    "own code": (
        lambda folder: edit_config(folder, auto_map={"AutoConfig": "evil.Config"}, model_type="evil"),
        {},
        "transformers cannot open it",
    ),
    "template": (
        lambda folder: (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": "{{ nothing.x.y }}"})
        ),
        {},
        "the model's tokenizer cannot be used",
    ),
}


@pytest.mark.parametrize(("damage", "keys", "sentence"), BAD.values(), ids=BAD)
def test_invalid_reward_model_folder_is_refused(
    tmp_path: Path, damage: Any, keys: dict[str, Any], sentence: str
) -> None:
    folder = make_reward_model(tmp_path)
    damage(folder)
    config = parse_config(tree_of("x", **{"path": str(folder), **keys}))
    with pytest.raises(ConfigError, match=sentence) as error:
        list(check_models(config, download=False))
    assert "\n" not in str(error.value)


def test_reward_model_with_several_labels_needs_a_label_name(three: Path) -> None:
    for keys, sentence in (
        ({}, "reward.label is not set: the model has 3 labels"),
        ({"label": "best"}, "no such label"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            list(check_models(parse_config(tree_of("x", path=str(three), **keys)), download=False))
    assert [*check_models(parse_config(tree_of("x", path=str(three), label="fair")), download=False)] == []


def test_language_model_is_refused_as_a_reward_model(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy")
    config = parse_config(tree_of("x", path=str(tmp_path / "policy"), label="LABEL_0"))
    with pytest.raises(ConfigError, match=r"tensors of LlamaForSequenceClassification are missing .*: score\.weight"):
        list(check_models(config, download=False))


def test_check_refuses_an_invalid_reward_model_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[policy]\npath = "policy"\n[reward]\nkind = "model"\npath = "./taste"\n')
    (tmp_path / "policy").mkdir()
    assert load_recipe(recipe).reward.path == str(tmp_path / "taste")  # type: ignore[union-attr]
    said = refused(capsys, "check", str(recipe))
    assert said.startswith(f"reward.path = '{tmp_path}/taste': there is no such folder")


def test_deadline_of_a_reward_model_beyond_patience_is_refused(one: Path) -> None:
    config = parse_config(tree_of("x", path=str(one), deadline_seconds=600))
    with pytest.raises(ConfigError, match=r"reward\.deadline_seconds = 600: the run fails after rollout\.patience_sec"):
        list(check_models(config, download=False))


def test_cold_start_with_a_reward_model_is_refused(one: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.kind = 'model': a cold start compares its responses with answers"):
        parse_config({"reward": {"kind": "model", "path": str(one)}})


@pytest.mark.long
def test_run_records_the_hashes_of_its_reward_models(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    context = prepare_small(tmp_path, reward={"kind": "model", "path": str(one)})
    [grade] = load_model(context).grade([(CHAT, "2")])
    assert grade == Classifier(config_of(one), one).grade([(CHAT, "2")])[0]
    names = {stored.path.rpartition("/")[2] for stored in context.created.models}
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert audit(context.store, deep=True).clean
    check_pinned(context.config, context)
    tree = {"policy": {"path": "p"}, "prompts": [{"kind": "sorting", "reward": "taste"}]}
    other = parse_config({**tree, "rewards": {"taste": {"kind": "model", "path": str(one)}}})
    with pytest.raises(ConfigError, match=r"rewards\.taste\.path = .*: a run stores its reward models at its start"):
        check_pinned(other, context)

    path = "reward_models/reward/model.safetensors"
    data = bytearray(context.store.get(path))
    data[-1] ^= 1
    context.store.put(path, bytes(data))
    with pytest.raises(Corrupt, match="a file of the reward model, is missing or altered"):
        load_model(context)
    assert any(path in found.where for found in audit(context.store, deep=True).violations)


def test_keys_of_a_reward_model_cannot_change_during_a_run(one: Path) -> None:
    config = parse_config(tree_of("x", path=str(one)))
    for key in ("path", "label", "scale", "offset", "dtype", "max_tokens", "cut", "kind", "correct_from"):
        assert explain_fixed(config, f"reward.{key}"), key
    for key in ("max_batch", "batch_tokens", "workers", "gpus", "cpus", "deadline_seconds"):
        assert not explain_fixed(config, f"reward.{key}"), key


def test_reward_models_reserve_cpus_and_gpus(one: Path) -> None:
    tree = {"policy": {"path": "x"}, "engine": {"kind": "timed"}, "evaluation": {"engine": "own"}}
    config = parse_config({**tree, **tree_of("x", path=str(one), workers=2, cpus=3, gpus=1)})
    plain = parse_config({**tree, "reward": {"kind": "exact"}})
    assert needed_cpus(config) - needed_cpus(plain) == pytest.approx(2 * 3 - 1)
    assert config.scorer_workers == 0
    assert divide_gpus(config, [4.0]) == divide_gpus(plain, [2.0])
    assert divide_gpus(config, [8.0]) == GpuShares(1.0, 1.0)
    for nodes in ([], [2.0]):
        with pytest.raises(ConfigError, match=r"reward\.gpus: the reward models need 2 of the \d GPUs of the cluster"):
            divide_gpus(config, nodes)
