"""Composes the judge service: scorers, calibrations, servicer."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from judge_service.backlog import Backlog
from judge_service.calibration import Calibration, CalibrationError
from judge_service.combination import Combination
from judge_service.guards import Guard
from judge_service.scorer_registry import NamedScorer, RegisteredScorer, ScorerRegistry
from judge_service.scorers import Scorer
from judge_service.scorers.combined import CombinedScorer
from judge_service.scorers.confidence import ConfidenceScorer
from judge_service.scorers.exact import ExactScorer
from judge_service.screened_scorer import ScreenedScorer
from judge_service.servicer import SERVICE, JudgeServicer
from penstock.proto.judge.v1 import judge_pb2_grpc
from services.access.certificates import CertificateFiles
from services.domain.instances import Role
from services.field_problems import SettingsError
from services.mesh_schema import MeshFile, MeshJudge, MeshScorer
from services.model_folder import model_folder
from services.runtime import Chassis
from services.settings import ServiceSettings, environment_value
from services.state.keys import Keys


async def compose(chassis: Chassis) -> None:
    """Load the scorers and add the judge service to the server.

    Raises:
        SettingsError: A scorer cannot be created.
    """
    judge = chassis.mesh.judge
    registered: dict[str, NamedScorer] = {}
    parts: dict[str, Scorer] = {}
    for scorer_settings in judge.scorers:
        name = scorer_settings.name
        if scorer_settings.kind == "screened":
            screen, costly = (registered[part] for part in scorer_settings.scorers)
            registered[name] = ScreenedScorer(name, screen, costly, scorer_settings.margin)
            continue
        scorer = build_scorer(scorer_settings, chassis.mesh, chassis.settings, parts)
        await started(scorer_settings, scorer)
        chassis.stack.push_async_callback(scorer.close)
        parts[name] = scorer
        registered[name] = RegisteredScorer(
            name, scorer, calibration_of(scorer_settings, chassis.settings), backlog_of(scorer_settings, judge)
        )
    guards = frozenset(map(Guard, judge.guards))
    registry = ScorerRegistry([*registered.values()], judge.default_scorer or judge.scorers[0].name, guards)
    servicer = JudgeServicer(registry, chassis.telemetry, [tier.name for tier in chassis.mesh.tiers])
    for server in (chassis.server, chassis.admin):
        judge_pb2_grpc.add_JudgeServiceServicer_to_server(servicer, server)
    chassis.health.offer(SERVICE)


async def started(settings: MeshScorer, scorer: Scorer) -> None:
    """Start a scorer.

    Raises:
        SettingsError: It cannot be started.
    """
    try:
        await scorer.start()
    except (OSError, ValueError) as error:
        raise SettingsError(f"judge.scorers: {settings.name}: {error}") from error


def backlog_of(scorer: MeshScorer, judge: MeshJudge) -> Backlog | None:
    """The queue of a scorer; None for scorers that answer at once."""
    match scorer.kind:
        case "judge-model":
            return Backlog(judge.max_queued, judge.max_batch)
        case "llm" | "reward" | "consistency" | "code":
            return Backlog(judge.max_queued, scorer.concurrency)
        case "combined":
            parts = [backlog_of(part, judge) for part in judge.scorers if part.name in scorer.scorers]
            at_once = [part.at_once for part in parts if part is not None]
            return Backlog(judge.max_queued, min(at_once)) if at_once else None
    return None


def build_scorer(
    scorer: MeshScorer, mesh: MeshFile, settings: ServiceSettings, others: Mapping[str, Scorer] | None = None
) -> Scorer:
    """Create the scorer that the mesh file describes, without starting it. others: scorers that it may combine, by name.

    Raises:
        SettingsError: It cannot be created, or its kind is `screened`, which has no scores of its own.
    """
    match scorer.kind:
        case "screened":
            raise SettingsError(
                f"judge.scorers: {scorer.name}: a screened scorer has nothing to fit; calibrate its parts"
            )
        case "exact":
            return ExactScorer(scorer.compare, scorer.tolerance)
        case "confidence":
            return ConfidenceScorer(scorer.statistic)
        case "json-schema":
            from judge_service.scorers.json_schema import JsonSchemaScorer

            return JsonSchemaScorer(settings.resolve(scorer.schema_file) if scorer.schema_file else None)
        case "code":
            from judge_service.sandbox import Sandbox, SandboxLimits
            from judge_service.scorers.code import CodeScorer

            return CodeScorer(Sandbox(SandboxLimits(scorer.timeout_s)), concurrency=scorer.concurrency)
        case "combined":
            return CombinedScorer([(others or {})[name] for name in scorer.scorers], combination_of(scorer, settings))
        case "consistency":
            return _consistency_scorer(scorer, mesh, settings)
        case "llm":
            return _llm_scorer(scorer, mesh, settings)
        case "reward":
            from judge_service.scorers.reward import RewardScorer

            return RewardScorer(
                scorer.endpoint,
                _folder(scorer, settings),
                api_key=_api_key(scorer),
                timeout_s=scorer.timeout_s,
                concurrency=scorer.concurrency,
            )
        case "judge-model":
            if not scorer.model:
                raise SettingsError(f"judge.scorers: {scorer.name}: a judge-model scorer needs a model")
            folder = _folder(scorer, settings)  # checked before torch, which takes seconds to import
            from judge_service.scorers.judge_model import BatchOptions, JudgeModelScorer

            judge = mesh.judge
            options = BatchOptions(judge.max_batch, judge.max_batch_tokens)
            return JudgeModelScorer(folder, options, threads=judge.threads, device=judge.device)


def _llm_scorer(scorer: MeshScorer, mesh: MeshFile, settings: ServiceSettings) -> Scorer:
    from judge_service.scorers.grading import REPLY_TOKENS
    from judge_service.scorers.llm import Chat, LlmScorer
    from judge_service.scorers.openai_chat import OpenAiChat
    from judge_service.tier_client import TierChat

    chat: Chat
    max_tokens = scorer.thinking_tokens + REPLY_TOKENS
    if scorer.tier:
        chat = TierChat(
            scorer.tier,
            settings.state_url(mesh),
            Keys(mesh.name),
            scorer.timeout_s,
            places_per_worker=_places_per_worker(scorer, mesh, [scorer.tier]),
            max_tokens=max_tokens,
            certificates=_certificates(mesh, settings),
        )
    else:
        chat = OpenAiChat(
            scorer.endpoint,
            scorer.model,
            api_key=_api_key(scorer),
            timeout_s=scorer.timeout_s,
            max_tokens=max_tokens,
            extra_body=scorer.extra_body,
        )
    return LlmScorer(chat, concurrency=scorer.concurrency, rubric=scorer.rubric, pairwise=scorer.pairwise)


def _certificates(mesh: MeshFile, settings: ServiceSettings) -> CertificateFiles | None:
    """Of judges, for calls to workers; None without TLS."""
    folder = settings.certificate_folder(mesh)
    return CertificateFiles.of_role(folder, Role.JUDGE.value) if folder is not None else None


def _consistency_scorer(scorer: MeshScorer, mesh: MeshFile, settings: ServiceSettings) -> Scorer:
    from judge_service.scorers.consistency import ConsistencyScorer, SampleOptions
    from judge_service.tier_client import TierChat

    tiers = [scorer.tier] if scorer.tier else [tier.name for tier in mesh.tiers]
    sampler = TierChat(
        scorer.tier,
        settings.state_url(mesh),
        Keys(mesh.name),
        scorer.timeout_s,
        places_per_worker=_places_per_worker(scorer, mesh, tiers),
        certificates=_certificates(mesh, settings),
    )
    options = SampleOptions(scorer.tier, scorer.samples, scorer.temperature, scorer.max_tokens, scorer.compare)
    return ConsistencyScorer(sampler, options, concurrency=scorer.concurrency)


def _places_per_worker(scorer: MeshScorer, mesh: MeshFile, tiers: Seq[str]) -> int:
    """Concurrent requests of one judge at each worker of the tiers."""
    places = min(mesh.tier(name).max_running for name in tiers)
    return max(1, round(places * scorer.tier_share / max(1, mesh.judge.replicas)))


def _folder(scorer: MeshScorer, settings: ServiceSettings) -> Path:
    folder = model_folder(settings, scorer.model)
    if not folder.is_dir():
        raise SettingsError(f"judge.scorers: {scorer.name}: no folder {folder}")
    return folder


def _api_key(scorer: MeshScorer) -> str | None:
    key = environment_value(scorer.api_key_env) if scorer.api_key_env else None
    if scorer.api_key_env and key is None:
        raise SettingsError(f"judge.scorers: {scorer.name}: {scorer.api_key_env} is not set")
    return key


def combination_of(scorer: MeshScorer, settings: ServiceSettings) -> Combination:
    """The fitted weights of a combined scorer.

    Raises:
        SettingsError: The file is bad, or was fitted to other scorers.
    """
    path = settings.resolve(scorer.calibration)
    try:
        combination = Combination.read(path)
    except CalibrationError as error:
        raise SettingsError(f"judge.scorers: {scorer.name}: {error}") from error
    if combination.scorers != scorer.scorers:
        raise SettingsError(
            f"judge.scorers: {scorer.name}: {path} was fitted to {', '.join(combination.scorers)}, "
            f"not to {', '.join(scorer.scorers)}"
        )
    return combination


def calibration_of(scorer: MeshScorer, settings: ServiceSettings) -> Calibration | None:
    """The calibration named in the mesh file, or the one in the folder of the judge model."""
    if scorer.kind == "combined":
        return None  # its file holds weights, and its scores are probabilities
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
