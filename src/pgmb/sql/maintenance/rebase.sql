-- Rebasing: making a log that was restored or copied from another cluster readable here.

-- Gives every event and position the ids of this cluster and raises the epoch, so that positions kept
-- outside from before are refused. Queues keep their place: what was not settled, leases included, is
-- delivered (again). Ticks and readers' positions are forgotten. Locks every log against publishers until
-- the transaction ends. Run it once after a restore, before publishers and consumers return.
create or replace function pgmb.rebase()
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  s pgmb.stream;
  q pgmb.queue;
  newest pgmb.claim;
  last bigint;
  place bigint;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if pg_is_in_recovery() then
    perform pgmb_internal.assert_primary();
  end if;
  -- Another cluster numbers roles in another way.
  update pgmb.queue_grant g set role_id = r.oid from pg_roles r where r.rolname = g.role and r.oid <> g.role_id;
  if to_regclass('pgmq.sender') is not null then
    execute 'update pgmq.sender g set role_id = r.oid from pg_roles r where r.rolname = g.role and r.oid <> g.role_id';
  end if;
  for s in select * from pgmb.stream order by id loop
    execute format('lock table pgmb.%I in share row exclusive mode', 'log_' || s.name);
    last := pgmb_internal.last_seq(s.name);
    for q in select * from pgmb.queue where stream = s.id order by id loop
      select * into newest from pgmb.claim c where c.queue = q.id order by c.id desc limit 1;
      -- What was leased goes to be tried again; so does what the position had not passed below its place.
      perform pgmb_internal.fail_event(q, e, c.id, 1, clock_timestamp(), 'rebased')
      from pgmb.claim c, pgmb_internal.claim_events(c) e
      where c.queue = q.id and c.state in ('leased', 'leased_own') and not pgmb_internal.is_void(c.queue, c.id);
      place := case when newest.place >= newest.upto then newest.batch_seq else newest.place end;
      begin
        perform pgmb_internal.fail_event(q, e, newest.id, 0, clock_timestamp(), null)
        from pgmb_internal.batch_events(s.id, newest.batch_snapshot, newest.batch_seq, newest.batch_next,
          format('%s:%s:', 9223372036854775807, 9223372036854775807)::pg_snapshot, newest.own, newest.own_seq,
          0, place, q.matching || pgmb_internal.asking(q), 9223372036854775807) e;
      exception when others then
        if q.plain or pgmb_internal.servers_trouble(sqlstate) then
          raise;
        end if;
        -- Its filter cannot be asked: rather too many than too few.
        perform pgmb_internal.pause_failing(q, format('%s (%s)', sqlerrm, sqlstate));
        perform pgmb_internal.fail_event(q, e, newest.id, 0, clock_timestamp(), null)
        from pgmb_internal.batch_events(s.id, newest.batch_snapshot, newest.batch_seq, newest.batch_next,
          format('%s:%s:', 9223372036854775807, 9223372036854775807)::pg_snapshot, newest.own, newest.own_seq,
          0, place, q.matching, 9223372036854775807) e;
      end;
      perform pgmb_internal.fail_event(q, e, newest.id, 0, clock_timestamp(), null) from pgmb_internal.lagging_events(q, newest) e;
      perform pgmb_internal.fail_leased(q, c.id, clock_timestamp(), 'rebased', 0)
      from pgmb.claim c where c.queue = q.id and c.state = 'leased_retries';
      delete from pgmb.claim c where c.queue = q.id;
      update pgmb.queue moved set moves = null where moved.id = q.id;
      delete from pgmb.shortened h where h.queue = q.id;
      delete from pgmb.settlement t where t.queue = q.id;
      insert into pgmb.claim (queue, id, token, state, bindings, events, lo, hi, place, upto,
        done_snapshot, done_seq, done_next, batch_snapshot, batch_seq, batch_next, expires_at, swept)
      values (q.id, newest.id + 1, 0, 'position', q.bindings, 0, place, place,
        place, last, '3:3:', 0, '3', '4:4:', last, '4', 'infinity', clock_timestamp());
    end loop;
    perform pgmb_internal.rebase_segment(g) from pgmb.segment g
    where g.stream = s.id and g.dropped_at is null order by g.number;
    -- The ids of segments that only the lake has are another cluster's too.
    update pgmb.segment g set max_xid = '3'
    where g.stream = s.id and g.dropped_at is not null and g.max_xid is not null;
    -- The trigger names the owner, who may be another here.
    execute format('drop trigger if exists refuse_full on pgmb.%I', 'log_' || s.name);
    perform pgmb_internal.guard_stream(s.name);
  end loop;
  delete from pgmb.tick;
  update pgmb.archived a set proofs = '{}' where a.proofs is not null;
  delete from pgmb.reader;
  update pgmb.installation i
  set epoch = i.epoch + 1, system_identifier = c.system_identifier,
    -- A copy elsewhere is another installation than the one that it was made of.
    identity = case when i.system_identifier = c.system_identifier then i.identity else gen_random_uuid() end
  from pg_control_system() c;
  perform pgmb_internal.write_lineage();
  perform set_config('pgmb.cluster_checked', '', false);
end $$;

-- Rewrites one segment's xids; 3 is below every xid that this cluster will give.
create or replace function pgmb_internal.rebase_segment(segment pgmb.segment)
returns void
language plpgsql
as $$
begin
  execute format('update pgmb.segment_%s_%s set xid = ''3''', (segment).stream, (segment).number);
  update pgmb.segment s
  set closed_xid = case when s.sealed_at is not null then '3'::xid8 end,
    max_xid = case when s.max_xid is not null then '3'::xid8 end
  where s.stream = (segment).stream and s.number = (segment).number;
end $$;
