"""Statistics: what a calibration pass measures of every layer, and the file that keeps it."""

from kvfold.compression.statistics.artifact import Statistics
from kvfold.compression.statistics.moments import Moment
from kvfold.compression.statistics.products import NoGradients
from kvfold.compression.statistics.quantities import QUANTITIES

__all__ = ["QUANTITIES", "Moment", "NoGradients", "Statistics"]
