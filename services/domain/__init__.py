"""Domain types shared by all services. Pure: only the standard library, no I/O, no clock."""

from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    NotServed,
    Overloaded,
    PenstockError,
    PromptTooLong,
    RequestFailed,
    RevisionConflict,
    Unavailable,
    invalid,
)
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.types.plans import JudgeUnavailable, Plan, Prediction, TierPlan
from penstock.types.problems import FieldProblem
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt, prompt_problems
from penstock.types.replies import FinishReason, PositionLogprobs, TokenFrame, TokenLogprob, Usage
from penstock.types.requests import GenerationRequest, request_id_problems
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloPhase

__all__ = [
    "CASCADE_MODEL",
    "AlreadyRunning",
    "ChatMessage",
    "ChatPrompt",
    "DeadlineExceeded",
    "FieldProblem",
    "FinishReason",
    "GenerationRequest",
    "InstanceRecord",
    "InvalidRequest",
    "JudgeUnavailable",
    "Load",
    "MeshView",
    "ModelCard",
    "NotFound",
    "NotServed",
    "Overloaded",
    "PenstockError",
    "Plan",
    "PositionLogprobs",
    "Prediction",
    "Prompt",
    "PromptTooLong",
    "RequestFailed",
    "RevisionConflict",
    "Role",
    "SamplingParams",
    "Slo",
    "SloPhase",
    "StepLatencyModel",
    "StepLoad",
    "TextPrompt",
    "TierPlan",
    "TokenFrame",
    "TokenLogprob",
    "TokenPrompt",
    "Unavailable",
    "Usage",
    "invalid",
    "prompt_problems",
    "request_id_problems",
]
