"""Puts the judge together: scorers, calibrations, servicer."""

from judge_service.backlog import Backlog
from judge_service.calibration import Calibration, CalibrationError
from judge_service.scorer_registry import RegisteredScorer, ScorerRegistry
from judge_service.scorers import Scorer
from judge_service.scorers.confidence import ConfidenceScorer
from judge_service.scorers.exact import ExactScorer
from judge_service.servicer import SERVICE, JudgeServicer
from penstock.proto.judge.v1 import judge_pb2_grpc
from services.model_folder import model_folder
from services.runtime import Chassis
from services.settings import MeshFile, MeshJudge, MeshScorer, ServiceSettings, SettingsError, environment_value
from services.state.keys import Keys


async def compose(chassis: Chassis) -> None:
    """Load the scorers and serve them. SettingsError for a scorer that cannot be made."""
    judge = chassis.mesh.judge
    scorers = []
    for wanted in judge.scorers:
        scorer = build_scorer(wanted, chassis.mesh, chassis.settings)
        try:
            await scorer.start()
        except (OSError, ValueError) as error:
            raise SettingsError(f"judge.scorers: {wanted.name}: {error}") from error
        chassis.stack.push_async_callback(scorer.close)
        scorers.append(
            RegisteredScorer(wanted.name, scorer, calibration_of(wanted, chassis.settings), backlog_of(wanted, judge))
        )
    registry = ScorerRegistry(scorers, judge.default_scorer or judge.scorers[0].name)
    servicer = JudgeServicer(registry, chassis.telemetry, [tier.name for tier in chassis.mesh.tiers])
    judge_pb2_grpc.add_JudgeServiceServicer_to_server(servicer, chassis.server)
    chassis.health.offer(SERVICE)


def backlog_of(wanted: MeshScorer, judge: MeshJudge) -> Backlog | None:
    """The bound on what waits for a scorer; None for those that only compare or compute."""
    at_once = {"judge-model": judge.max_batch, "llm": wanted.concurrency}.get(wanted.kind)
    return Backlog(judge.max_queued, at_once) if at_once is not None else None


def build_scorer(wanted: MeshScorer, mesh: MeshFile, settings: ServiceSettings) -> Scorer:
    """The scorer that the mesh file asks for, not started."""
    match wanted.kind:
        case "exact":
            return ExactScorer(wanted.compare)
        case "confidence":
            return ConfidenceScorer()
        case "llm":
            from judge_service.scorers.llm import Chat, LlmScorer, OpenAiChat
            from judge_service.tier_client import TierChat

            chat: Chat
            if wanted.tier:
                tier = mesh.tier(wanted.tier)
                places = max(1, round(tier.max_running * wanted.tier_share / max(1, mesh.judge.replicas)))
                chat = TierChat(
                    wanted.tier, settings.state_url(mesh), Keys(mesh.name), wanted.timeout_s, places_per_worker=places
                )
            else:
                key = environment_value(wanted.api_key_env) if wanted.api_key_env else None
                if wanted.api_key_env and key is None:
                    raise SettingsError(f"judge.scorers: {wanted.name}: {wanted.api_key_env} is not set")
                chat = OpenAiChat(wanted.endpoint, wanted.model, api_key=key, timeout_s=wanted.timeout_s)
            return LlmScorer(chat, concurrency=wanted.concurrency)
        case "judge-model":
            from judge_service.scorers.judge_model import (
                BatchOptions,
                JudgeModelScorer,
            )  # torch takes seconds to import

            if not wanted.model:
                raise SettingsError(f"judge.scorers: {wanted.name}: a judge-model scorer needs a model")
            judge = mesh.judge
            options = BatchOptions(judge.max_batch, judge.max_batch_tokens)
            folder = model_folder(settings, wanted.model)
            return JudgeModelScorer(folder, options, threads=judge.threads, device=judge.device)


def calibration_of(wanted: MeshScorer, settings: ServiceSettings) -> Calibration | None:
    """The calibration that the mesh file names, or that lies beside the judge model."""
    if wanted.calibration:
        path = settings.resolve(wanted.calibration)
    elif wanted.kind == "judge-model" and (settings.resolve(wanted.model) / "calibration.json").exists():
        path = settings.resolve(wanted.model) / "calibration.json"
    else:
        return None
    try:
        return Calibration.read(path)
    except CalibrationError as error:
        raise SettingsError(f"judge.scorers: {wanted.name}: {error}") from error
