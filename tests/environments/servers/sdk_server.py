"""An MCP server that is built with the official SDK, and knows nothing of rollflow: a shop with a stock."""

from __future__ import annotations

import sys
from typing import Annotated

from pydantic import BaseModel, Field

try:
    from mcp.server.mcpserver import MCPServer

    careless = sys.stdout  # the SDK separates the program's own output from the protocol
except ImportError:  # before version 2
    from mcp.server.fastmcp import FastMCP as MCPServer

    careless = sys.stderr

server = MCPServer("shop")
stock: dict[str, int] = {}


class Count(BaseModel):
    """How many pieces of a ware there are."""

    ware: str
    count: int


@server.tool()
def store(ware: str, count: Annotated[int, Field(ge=1, description="number of pieces")]) -> str:
    """Put pieces of a ware into the stock."""
    stock[ware] = stock.get(ware, 0) + count
    print("a line that a careless server prints", file=careless)
    return f"{stock[ware]} pieces of {ware}"


@server.tool()
def look_up(ware: str) -> Count:
    """Return how many pieces of a ware there are."""
    if ware not in stock:
        raise ValueError(f"there is no {ware} here")
    return Count(ware=ware, count=stock[ware])


if __name__ == "__main__":
    server.run()
