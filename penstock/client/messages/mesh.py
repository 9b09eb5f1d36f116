"""What a mesh reports of itself, from protobuf messages: status, moves, traces, requests and usage."""

from penstock.client import mesh_status, types
from penstock.client.messages.times import seconds
from penstock.proto.router.v1 import router_pb2 as pb

_STATES = {
    pb.INSTANCE_STATE_READY: "ready",
    pb.INSTANCE_STATE_DRAINING: "draining",
    pb.INSTANCE_STATE_EJECTED: "ejected",
}


def status_from_proto(status: pb.MeshStatus) -> mesh_status.MeshStatus:
    router = status.router
    return mesh_status.MeshStatus(
        router_id=status.router_id,
        plan_revision=status.plan_revision,
        connected=status.state_connected,
        state_age_s=seconds(status.state_age),
        tiers=tuple(
            mesh_status.TierStatus(
                name=t.name,
                model=t.model,
                threshold=t.threshold if t.HasField("threshold") else None,
                planned_instances=t.planned_instance_count,
                live_instances=t.live_instance_count,
                running=t.running_count,
                queued=t.queued_count,
                output_tokens_per_s=t.output_tokens_per_second,
                answered=t.answered_count,
                escalated=t.escalated_count,
                accepted_draft_tokens=t.accepted_draft_token_count,
                rejected_draft_tokens=t.rejected_draft_token_count,
            )
            for t in status.tiers
        ),
        instances=tuple(
            mesh_status.InstanceStatus(
                instance_id=i.instance_id,
                role=i.role,
                tier=i.tier,
                address=i.address,
                engine=i.engine,
                state=_STATES.get(i.state, "unknown"),
                running=i.running_count,
                queued=i.queued_count,
                free_kv_blocks=i.free_kv_blocks,
                kv_blocks=i.kv_blocks,
                output_tokens_per_s=i.output_tokens_per_second,
                age_s=seconds(i.age),
                place=mesh_status.StagePlace(i.place.stage, i.place.from_tokens, i.place.to_tokens)
                if i.HasField("place")
                else None,
                admin_address=i.admin_address,
                processes=i.process_count or 1,  # 0: of a router that knows no such field
                drafting=_drafting_from_proto(i.drafting) if i.HasField("drafting") else None,
            )
            for i in status.instances
        ),
        active=router.active_count,
        waiting=router.waiting_count,
        finished=router.finished_count,
        failed=router.failed_count,
        rejected=router.rejected_count,
        failovers=router.failover_count,
        migrations=router.migration_count,
        advice_unmet=router.advice_unmet_count,
        requests_per_s=router.requests_per_second,
        ttft_p50_s=seconds(router.time_to_first_token_p50),
        ttft_p95_s=seconds(router.time_to_first_token_p95),
        processes=tuple(
            mesh_status.RouterProcessStatus(
                index=p.index,
                instance_id=p.instance_id,
                answering=p.answering,
                active=p.active_count,
                waiting=p.waiting_count,
                finished=p.finished_count,
            )
            for p in status.processes
        ),
        slo=mesh_status.SloCounts(
            attained=router.slo.attained_count,
            broken=router.slo.broken_count,
            best_effort=router.slo.best_effort_count,
            declined=router.slo.declined_count,
        ),
        burst=_burst_from_proto(router.burst) if router.HasField("burst") else None,
    )


def move_from_proto(response: pb.MoveReplyResponse) -> mesh_status.Move:
    if response.HasField("refusal"):
        return mesh_status.Move(response.refusal)
    return mesh_status.Move(None, response.moved.offset, seconds(response.moved.stall), response.moved.sent_bytes)


def trace_from_proto(trace: pb.Trace) -> mesh_status.Trace:
    return mesh_status.Trace(
        trace.trace_id,
        tuple(
            mesh_status.Span(
                span_id=s.span_id,
                parent_span_id=s.parent_span_id,
                name=s.name,
                service=s.service,
                start_s=s.start_time.ToNanoseconds() / 1e9,
                duration_s=seconds(s.duration),
                failed=s.failed,
                status_message=s.status_message,
                attributes={a.key: a.value for a in s.attributes},
                events=tuple((e.name, seconds(e.after)) for e in s.events),
            )
            for s in trace.spans
        ),
    )


def served_request_from_proto(request: pb.ServedRequest) -> mesh_status.ServedRequest:
    return mesh_status.ServedRequest(
        request.arrival_seconds,
        request.prompt_token_count,
        request.output_token_count,
        request.tier,
        request.cached_prompt_token_count,
    )


def sampled_prompt_from_proto(prompt: pb.SampledPrompt) -> list[types.Message]:
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


def usage_from_proto(entry: pb.TenantUsage) -> mesh_status.TenantUsage:
    return mesh_status.TenantUsage(
        entry.tenant,
        entry.key_id,
        entry.tier,
        entry.request_count,
        entry.prompt_token_count,
        entry.output_token_count,
        entry.tier_seconds,
        entry.cost,
        entry.compute_seconds,
    )


def _burst_from_proto(burst: pb.BurstStatus) -> mesh_status.BurstStatus:
    return mesh_status.BurstStatus(
        step=burst.step,
        steps=burst.step_count,
        mean_quality=burst.mean_quality,
        window_quality=burst.window_quality if burst.HasField("window_quality") else None,
        budget_left=burst.budget_left_share,
        out_of_budget=burst.out_of_budget,
        arrivals_per_s=burst.arrivals_per_second,
        changes=burst.change_count,
        last_changes=tuple(
            mesh_status.BurstChange(
                change.at.ToNanoseconds() / 1e9,
                change.from_step,
                change.to_step,
                pb.BurstReason.Name(change.reason).removeprefix("BURST_REASON_").lower()
                if change.reason in pb.BurstReason.values()
                else "unknown",
            )
            for change in burst.changes
        ),
    )


def _drafting_from_proto(drafting: pb.Drafting) -> mesh_status.Drafting:
    share = drafting.accepted_share if drafting.HasField("accepted_share") else None
    return mesh_status.Drafting(tuple(drafting.chain), drafting.window_tokens, share)
