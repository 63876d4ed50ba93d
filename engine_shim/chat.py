"""Chat messages to prompt text, through the model's own template: the router's rendering, with the shim's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_shim.api import ApiError, Message
from router.wire.chat_template import ChatTemplate as SharedTemplate
from router.wire.chat_template import TemplateRefusal


class ChatTemplate:
    """A compiled template. ``special_tokens`` are the names templates use, such as ``bos_token``."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Compile. Raises ``jinja2.TemplateSyntaxError``."""
        self._template = SharedTemplate(source, variables=special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        """The prompt's text. Raises ``ApiError`` where the messages or the template refuse."""
        try:
            return self._template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
            )
        except TemplateRefusal as error:
            raise ApiError(f"The chat template refuses: {error}", param="messages") from error
