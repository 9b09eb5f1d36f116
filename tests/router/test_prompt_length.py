"""A prompt's length is guessed from what workers have counted."""

from router_service.routing.prompt_length import PromptLengths
from services.domain.requests import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt


def test_each_tier_learns_its_own_tokens_per_character() -> None:
    lengths = PromptLengths()
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 100, "four characters to a token, until told otherwise"
    lengths.learn("small", TextPrompt("x" * 100), 120)
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 480
    assert lengths.estimate("large", TextPrompt("x" * 400)) == 100
    for _ in range(100):
        lengths.learn("small", ChatPrompt((ChatMessage("user", "x" * 100),)), 50)
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 200
    lengths.learn("small", TextPrompt(""), 7)
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 200, "an empty prompt tells nothing"


def test_token_ids_are_counted() -> None:
    assert PromptLengths().estimate("small", TokenPrompt((1, 2, 3))) == 3
