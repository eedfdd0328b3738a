"""Statistics: what a calibration pass measures of every layer, and the file that keeps it."""

from kvfold.calibration.statistics.artifact import Statistics
from kvfold.calibration.statistics.moments import Moment
from kvfold.calibration.statistics.products import NoGradients
from kvfold.calibration.statistics.quantities import QUANTITIES

__all__ = ["QUANTITIES", "Moment", "NoGradients", "Statistics"]
