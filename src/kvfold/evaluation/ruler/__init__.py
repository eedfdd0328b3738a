"""RULER (Hsieh et al. 2024): its thirteen tasks (`tasks`), and short ones in its words whose
question comes after their context was compressed (`examples`)."""

from kvfold.evaluation.ruler.late import KINDS as KINDS
from kvfold.evaluation.ruler.late import examples as examples
