"""Data-parallel training of unmodified PyTorch models with sparse parameters."""

from parallax.api import distribute as distribute
from parallax.api import explain as explain
from parallax.api import no_sync as no_sync
from parallax.api import reduce as reduce
from parallax.api import shutdown as shutdown
from parallax.api import traffic as traffic
from parallax.api import weight as weight
from parallax.comm import DisagreementError as DisagreementError
from parallax.comm import ParallaxError as ParallaxError
from parallax.comm import PeerError as PeerError
from parallax.comm import rank as rank
from parallax.comm import world_size as world_size
from parallax.config import Config as Config
from parallax.data import shard as shard
from parallax.plan import Placement as Placement
from parallax.plan import Plan as Plan
from parallax.plan import Use as Use
from parallax.runtime import Traffic as Traffic
from parallax.verify import Report as Report
from parallax.verify import verify as verify
