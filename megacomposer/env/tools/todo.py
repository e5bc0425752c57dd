"""The to-do list: what the agent means to do. It lives on the host, not in the sandbox."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from msgspec import Meta

from megacomposer.env.tools.schema import Arguments, Tool, ToolError

MAX_ITEMS = 100

ItemText = Annotated[str, Meta(min_length=1, max_length=500)]
ItemStatus = Literal["pending", "in_progress", "done", "dropped"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TodoItem:
    """One thing to do."""

    text: str
    status: ItemStatus = "pending"


class TodoChange(Arguments, frozen=True, kw_only=True):
    id: Annotated[int, Meta(ge=1, description="The number in the list.")]
    status: ItemStatus | None = None
    text: ItemText | None = None


class Todo(Arguments, frozen=True, kw_only=True):
    create: Annotated[
        tuple[ItemText, ...], Meta(max_length=MAX_ITEMS, description="New items, in order.")
    ] = ()
    update: Annotated[
        tuple[TodoChange, ...], Meta(max_length=MAX_ITEMS, description="Changes, made first.")
    ] = ()


class TodoList:
    """The tool and its state."""

    def __init__(self, items: tuple[TodoItem, ...] = ()) -> None:
        self.items = items

    def tools(self) -> tuple[Tool, ...]:
        return (
            Tool(
                name="todo",
                description="Keep a to-do list: create items, update their status or text; the"
                " answer is the whole list. Without arguments it only shows it.",
                arguments=Todo,
                run=self._run,
            ),
        )

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Texts of the items that are neither done nor dropped."""
        return tuple(item.text for item in self.items if item.status in ("pending", "in_progress"))

    async def _run(self, arguments: Todo) -> str:
        items = list(self.items)
        for change in arguments.update:
            if change.id > len(items):
                known = f"1 to {len(items)}" if items else "none, the list is empty"
                raise ToolError("not_found", f"todo: there is no item {change.id}; ids: {known}.")
            if change.status is None and change.text is None:
                text = f"todo: the update of item {change.id} changes nothing; give status or text."
                raise ToolError("bad_arguments", text)
            old = items[change.id - 1]
            items[change.id - 1] = TodoItem(
                text=change.text or old.text, status=change.status or old.status
            )
        items += [TodoItem(text=text) for text in arguments.create]
        if len(items) > MAX_ITEMS:
            raise ToolError("limit", f"todo: {len(items)} items; at most {MAX_ITEMS} are kept.")
        self.items = tuple(items)
        if not items:
            return "The list is empty."
        return "\n".join(
            f"{number}. [{item.status}] {item.text}" for number, item in enumerate(items, 1)
        )
