"""The model's chat template and the text of single tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distserve_tools.openai_api.errors import ApiError


class ChatTokenizer:
    """Tokenizer of the model folder; needs nothing but its files."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant answers. Raises `ApiError` 400."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template is the model's code and raises what it likes
            raise ApiError(
                400, f"messages: refused by the chat template: {error}", param="messages"
            ) from None
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))
