"""The SDK. Of Penstock it imports only the stubs. Its public names are the classes and functions imported here."""

from types import ModuleType

from penstock.client.aio import AsyncClient as AsyncClient
from penstock.client.aio_planner import AsyncPlannerClient as AsyncPlannerClient
from penstock.client.connection import Tls as Tls
from penstock.client.errors import AuthenticationError as AuthenticationError
from penstock.client.errors import ConflictError as ConflictError
from penstock.client.errors import DeadlineError as DeadlineError
from penstock.client.errors import InvalidRequestError as InvalidRequestError
from penstock.client.errors import NotFoundError as NotFoundError
from penstock.client.errors import OverloadedError as OverloadedError
from penstock.client.errors import PenstockError as PenstockError
from penstock.client.errors import PermissionDeniedError as PermissionDeniedError
from penstock.client.errors import RequestFailedError as RequestFailedError
from penstock.client.errors import UnavailableError as UnavailableError
from penstock.client.retries import RetryPolicy as RetryPolicy
from penstock.client.sync import Client as Client
from penstock.client.sync_planner import PlannerClient as PlannerClient
from penstock.client.types import Event as Event
from penstock.client.types import Message as Message
from penstock.client.types import Model as Model
from penstock.client.types import Move as Move
from penstock.client.types import Options as Options
from penstock.client.types import Prompt as Prompt
from penstock.client.types import Reply as Reply
from penstock.client.types import Tokens as Tokens
from penstock.question_files.errors import FileError as FileError
from penstock.question_files.questions import load_question as load_question
from penstock.types.deployments import DeployedTier as DeployedTier
from penstock.types.deployments import Deployment as Deployment
from penstock.types.deployments import ReplicaGroup as ReplicaGroup
from penstock.types.events import Accepted as Accepted
from penstock.types.events import Escalated as Escalated
from penstock.types.events import Finished as Finished
from penstock.types.events import InstanceChanged as InstanceChanged
from penstock.types.events import Judged as Judged
from penstock.types.events import TierAdmitted as TierAdmitted
from penstock.types.events import TierDeclined as TierDeclined
from penstock.types.events import TierStarted as TierStarted
from penstock.types.events import TierSummary as TierSummary
from penstock.types.mesh_status import Drafting as Drafting
from penstock.types.mesh_status import InstanceStatus as InstanceStatus
from penstock.types.mesh_status import Loading as Loading
from penstock.types.mesh_status import MeshStatus as MeshStatus
from penstock.types.mesh_status import RouterProcessStatus as RouterProcessStatus
from penstock.types.mesh_status import SloCounts as SloCounts
from penstock.types.mesh_status import Span as Span
from penstock.types.mesh_status import StagePlace as StagePlace
from penstock.types.mesh_status import TenantUsage as TenantUsage
from penstock.types.mesh_status import TierStatus as TierStatus
from penstock.types.mesh_status import Trace as Trace
from penstock.types.planned import CascadeChoice as CascadeChoice
from penstock.types.planned import CascadePlan as CascadePlan
from penstock.types.planned import DraftChoice as DraftChoice
from penstock.types.planned import LargestAlone as LargestAlone
from penstock.types.planned import PlannedDrafter as PlannedDrafter
from penstock.types.planned import PlannedSpeculation as PlannedSpeculation
from penstock.types.planned import PlannedTier as PlannedTier
from penstock.types.planned import PlanProgress as PlanProgress
from penstock.types.planned import ReplicaDrafts as ReplicaDrafts
from penstock.types.planned import RunnerUp as RunnerUp
from penstock.types.planned import Unreachable as Unreachable
from penstock.types.planning import JudgedPrompt as JudgedPrompt
from penstock.types.planning import JudgedPrompts as JudgedPrompts
from penstock.types.planning import PlanningQuestion as PlanningQuestion
from penstock.types.plans import Plan as Plan
from penstock.types.plans import Prediction as Prediction
from penstock.types.plans import SequenceInFlight as SequenceInFlight
from penstock.types.plans import Stage as Stage
from penstock.types.plans import StageLayout as StageLayout
from penstock.types.plans import StagesVerdict as StagesVerdict
from penstock.types.plans import TierPlan as TierPlan
from penstock.types.replies import FinishReason as FinishReason
from penstock.types.replies import PositionLogprobs as PositionLogprobs
from penstock.types.replies import TokenLogprob as TokenLogprob
from penstock.types.replies import Usage as Usage
from penstock.types.rules import LongAnswers as LongAnswers
from penstock.types.rules import RuleOptions as RuleOptions
from penstock.types.rules import SkipFor as SkipFor
from penstock.types.simulated import Percentiles as Percentiles
from penstock.types.simulated import SimulatedTier as SimulatedTier
from penstock.types.simulated import Simulation as Simulation
from penstock.types.simulated import UserLatency as UserLatency
from penstock.types.slo import Slo as Slo
from penstock.types.slo import SloPhase as SloPhase
from penstock.types.slo import SloResult as SloResult
from penstock.types.structured import StructuredOutput as StructuredOutput
from penstock.types.tools import Tool as Tool
from penstock.types.tools import ToolCall as ToolCall

NAMES = sorted(
    name
    for name, value in vars().items()
    if name[0] != "_" and name != "ModuleType" and not isinstance(value, ModuleType)
)
"""The public names. No `__all__`: type checkers would want it written out."""
