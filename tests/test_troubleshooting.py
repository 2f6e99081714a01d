"""Each symptom of docs/troubleshooting.md has a cause and a remedy, and what it quotes is said."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
SYMPTOMS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
QUOTES = [
    " ".join(re.sub(r"^> ?", "", quote, flags=re.MULTILINE).split())
    for quote in re.findall(r"(?:^>.*\n)+", TEXT, re.MULTILINE)
]
FORMAT = re.compile(r"%\.?\d*[sdfr]|\{\w*\}")


def said_by_the_product():
    """Yield each string of the product, its values as `…`."""
    for folder in ("moe_compile", "passes", "torchtitan_integration"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = getattr(node, "values", [node] if isinstance(node, ast.Constant) else [])
                texts = (p.value if isinstance(p, ast.Constant) else "…" for p in parts)
                yield FORMAT.sub("…", "".join(text for text in texts if isinstance(text, str)))


SAID = {text for text in said_by_the_product() if " " in text}


def test_there_are_twenty_symptoms_and_more():
    assert len(SYMPTOMS) >= 20


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_has_a_cause_and_then_what_to_do(symptom):
    text = SYMPTOMS[symptom]
    assert 0 <= text.find("**Cause.** ") < text.find("**To do.** ")


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_line_is_one_that_is_printed(quote):
    parts = [re.escape(part.strip()) for part in quote.split("…") if part.strip()]
    assert max(map(len, parts)) > 12
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in SAID)
