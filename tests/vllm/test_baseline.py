"""vLLM alone, without the plugin, answers as the reference does: what compares engines here can be trusted."""

import pytest

from tests.vllm import engine, tiny
from tests.vllm.reference import Reference, deviation

QUANTIZATION = {"plain": "fp8_per_channel", "fp8": "compressed-tensors"}
# W8A8 carries a difference of one rounding on to the next layer's codes: 0.04 to 0.08 and 0.3 were seen, while another
# adapter, or none, makes 1.2 to 2.3 and 3.9 to 5.5.
MEAN, LARGEST = 0.15, 0.7


@pytest.fixture(scope="module")
def answers(checkpoints, adapters, tmp_path_factory):
    """Each checkpoint's answers to the same requests."""
    folder = tmp_path_factory.mktemp("baseline")
    return {
        kind: engine.run(
            {
                "model": model,
                "adapters": adapters,
                "requests": tiny.requests(),
                "engine": {"quantization": QUANTIZATION[kind]},
                "env": {"VLLM_PLUGINS": ""},
            },
            folder / kind,
        )["answers"]
        for kind, model in checkpoints.items()
    }


@pytest.mark.parametrize("kind", QUANTIZATION)
def test_mixed_rows_are_as_expected(answers, checkpoints, adapters, kind):
    reference = Reference(checkpoints[kind], adapters)
    sure = 0
    for request, answer in zip(tiny.requests(), answers[kind], strict=True):
        assert len(answer["tokens"]) == request["tokens"]
        found = deviation(reference.score(request["prompt"], answer["tokens"], request["adapter"]), answer)
        assert found.mean < MEAN and found.largest < LARGEST and not found.wrong, (request["adapter"], found)
        sure += found.sure
    assert sure >= 20


def test_another_adapter_or_none_would_be_seen(answers, checkpoints, adapters):
    reference = Reference(checkpoints["plain"], adapters)
    for request, answer in zip(tiny.requests(), answers["plain"], strict=True):
        for other in {None, *adapters} - {request["adapter"]}:
            found = deviation(reference.score(request["prompt"], answer["tokens"], other), answer)
            assert found.mean > 5 * MEAN and found.largest > 3 * LARGEST, (request["adapter"], other, found)


def test_chosen_tokens_are_the_most_likely(answers):
    for answer in answers["plain"]:
        for token, step in zip(answer["tokens"], answer["logprobs"], strict=True):
            assert step[str(token)] == max(step.values())


def test_a_checkpoint_of_this_library_is_what_vllm_quantizes_itself(answers):
    assert answers["fp8"] == answers["plain"]
