"""The metrics of LongBench (Bai et al. 2024), as its released scripts compute them: functions of an
answer, an expected answer and the classes of a data set, with scores in [0, 1]."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

Classes = Sequence[str]
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def word_f1(answer: str, expected: str, classes: Classes = ()) -> float:
    """F1 of the words, in lower case, without articles and punctuation (qa_f1)."""
    words, wanted = _words(answer), _words(expected)
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted)) if shared else 0.0


def _words(text: str) -> list[str]:
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    return re.sub(r"\b(?:a|an|the)\b", " ", plain).split()


def rouge_l(answer: str, expected: str, classes: Classes = ()) -> float:
    """ROUGE-L of a summary, as the package `rouge` 1.0.1 computes it: the different words in the
    longest common subsequences of any two sentences, of the different words of both texts."""
    hypothesis, reference = _sentences(answer), _sentences(expected)
    if not hypothesis or not reference:
        return 0.0
    shared = {word for x in reference for y in hypothesis for word in common_subsequence(x, y)}
    precision, recall = (
        len(shared) / len({word for words in text for word in words})
        for text in (hypothesis, reference)
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence. A blank sentence has one empty word, which counts."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """The longest common subsequence; of several, the one that leaves out the later words of
    `y`."""
    lengths = [[0] * (len(y) + 1)]
    for i, word in enumerate(x):
        above, row = lengths[i], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    common, i, j = [], len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            common.append(x[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common[::-1]


def class_named(answer: str, expected: str, classes: Classes = ()) -> float:
    """1 over the number of classes that the answer names, if the expected one is among them."""
    named = [name for name in classes if name in answer]
    for name in named:  # a name that is removed hides the next one, as in the released script
        if name in expected and name != expected:
            named.remove(name)
    return 1 / len(named) if expected in named else 0.0


def share_of_numbers(answer: str, expected: str, classes: Classes = ()) -> float:
    """The share of the answer's numbers that are the expected one (count)."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def share_of_paragraphs(answer: str, expected: str, classes: Classes = ()) -> float:
    """The share of the answer's numbers that are the number of the expected paragraph
    (retrieval)."""
    number = re.search(r"Paragraph (\d+)", expected)
    return share_of_numbers(answer, number[1]) if number else 0.0


def code_similarity(answer: str, expected: str, classes: Classes = ()) -> float:
    """The similarity of the answer's first line of code with the expected one, in hundredths, as
    the package `fuzzywuzzy` 0.18 computes it with Python's difflib."""
    lines = answer.lstrip("\n").split("\n")
    code = next((x for x in lines if not re.search("[`#]|//", x)), "")
    if not code or not expected:
        return float(code == expected)
    return round(100 * SequenceMatcher(None, code, expected).ratio()) / 100
