"""Composes the judge service: scorers, calibrations, servicer."""

from judge_service.backlog import Backlog
from judge_service.calibration import Calibration, CalibrationError
from judge_service.scorer_registry import RegisteredScorer, ScorerRegistry
from judge_service.scorers import Scorer
from judge_service.scorers.confidence import ConfidenceScorer
from judge_service.scorers.exact import ExactScorer
from judge_service.servicer import SERVICE, JudgeServicer
from penstock.proto.judge.v1 import judge_pb2_grpc
from services.access.certificates import CertificateFiles
from services.domain.instances import Role
from services.model_folder import model_folder
from services.runtime import Chassis
from services.settings import MeshFile, MeshJudge, MeshScorer, ServiceSettings, SettingsError, environment_value
from services.state.keys import Keys


async def compose(chassis: Chassis) -> None:
    """Load the scorers and add the judge service to the server.

    Raises:
        SettingsError: A scorer cannot be created.
    """
    judge = chassis.mesh.judge
    scorers = []
    for scorer_settings in judge.scorers:
        scorer = build_scorer(scorer_settings, chassis.mesh, chassis.settings)
        try:
            await scorer.start()
        except (OSError, ValueError) as error:
            raise SettingsError(f"judge.scorers: {scorer_settings.name}: {error}") from error
        chassis.stack.push_async_callback(scorer.close)
        scorers.append(
            RegisteredScorer(
                scorer_settings.name,
                scorer,
                calibration_of(scorer_settings, chassis.settings),
                backlog_of(scorer_settings, judge),
            )
        )
    registry = ScorerRegistry(scorers, judge.default_scorer or judge.scorers[0].name)
    servicer = JudgeServicer(registry, chassis.telemetry, [tier.name for tier in chassis.mesh.tiers])
    for server in (chassis.server, chassis.admin):
        judge_pb2_grpc.add_JudgeServiceServicer_to_server(servicer, server)
    chassis.health.offer(SERVICE)


def backlog_of(scorer: MeshScorer, judge: MeshJudge) -> Backlog | None:
    """The queue of a scorer; None for scorers that answer at once."""
    at_once = {"judge-model": judge.max_batch, "llm": scorer.concurrency}.get(scorer.kind)
    return Backlog(judge.max_queued, at_once) if at_once is not None else None


def build_scorer(scorer: MeshScorer, mesh: MeshFile, settings: ServiceSettings) -> Scorer:
    """Create the scorer that the mesh file describes, without starting it."""
    match scorer.kind:
        case "exact":
            return ExactScorer(scorer.compare)
        case "confidence":
            return ConfidenceScorer()
        case "llm":
            from judge_service.scorers.llm import Chat, LlmScorer, OpenAiChat
            from judge_service.tier_client import TierChat

            chat: Chat
            if scorer.tier:
                tier = mesh.tier(scorer.tier)
                places = max(1, round(tier.max_running * scorer.tier_share / max(1, mesh.judge.replicas)))
                folder = settings.certificate_folder(mesh)
                chat = TierChat(
                    scorer.tier,
                    settings.state_url(mesh),
                    Keys(mesh.name),
                    scorer.timeout_s,
                    places_per_worker=places,
                    certificates=CertificateFiles.of_role(folder, Role.JUDGE.value) if folder is not None else None,
                )
            else:
                key = environment_value(scorer.api_key_env) if scorer.api_key_env else None
                if scorer.api_key_env and key is None:
                    raise SettingsError(f"judge.scorers: {scorer.name}: {scorer.api_key_env} is not set")
                chat = OpenAiChat(scorer.endpoint, scorer.model, api_key=key, timeout_s=scorer.timeout_s)
            return LlmScorer(chat, concurrency=scorer.concurrency)
        case "judge-model":
            if not scorer.model:
                raise SettingsError(f"judge.scorers: {scorer.name}: a judge-model scorer needs a model")
            folder = model_folder(settings, scorer.model)
            if not folder.is_dir():  # checked before torch, which takes seconds to import
                raise SettingsError(f"judge.scorers: {scorer.name}: no folder {folder}")
            from judge_service.scorers.judge_model import BatchOptions, JudgeModelScorer

            judge = mesh.judge
            options = BatchOptions(judge.max_batch, judge.max_batch_tokens)
            return JudgeModelScorer(folder, options, threads=judge.threads, device=judge.device)


def calibration_of(scorer: MeshScorer, settings: ServiceSettings) -> Calibration | None:
    """The calibration named in the mesh file, or the one in the folder of the judge model."""
    if scorer.calibration:
        path = settings.resolve(scorer.calibration)
    elif scorer.kind == "judge-model" and (settings.resolve(scorer.model) / "calibration.json").exists():
        path = settings.resolve(scorer.model) / "calibration.json"
    else:
        return None
    try:
        return Calibration.read(path)
    except CalibrationError as error:
        raise SettingsError(f"judge.scorers: {scorer.name}: {error}") from error
