-- Sending. A message that may be read at once goes into the log; one with a delay takes a number of the log and waits
-- in pgmq.parked. Both commit with the caller's transaction and take no lock that another sender waits for.

-- The queue of that name, if the caller may send to it. Errors: 42P01, 42501.
create or replace function pgmq.queue_for_sender(queue_name text)
returns pgmq.queue
language plpgsql stable
as $$
declare
  named pgmq.queue := pgmq.queue_named(queue_name);
  caller name := pgmb_internal.caller();
begin
  if not pg_has_role(caller, current_user, 'usage')
    and not pgmb_internal.acts_for(caller, 'pgmb_publisher') and not pgmb_internal.acts_for(caller, 'pgmb_admin')
    and not exists (
      select from pgmq.sender s
      where s.queue = named.id and pg_has_role(caller, s.role_id, 'usage'))
  then
    raise exception 'role % may not send to queue %', caller, named.queue_name using errcode = '42501',
      hint = 'Grant it with pgmq.grant_send(queue_name, role), or the role pgmb_publisher for all queues.';
  end if;
  return named;
end $$;

-- The group of a message, for reads by group. Groups are told apart by a hash: two that share one wait for each other.
create or replace function pgmq.fifo_of(headers jsonb)
returns bigint
language sql immutable
as $$
  select hashtextextended(coalesce(headers ->> 'x-pgmq-group', '_default_fifo_group'), 0)
$$;

-- Writes messages to a queue and returns their numbers, in the array's order. headers: null, or one an element.
-- topic: what readers of the log see; the queue's name, or a routing key.
create or replace function pgmq.write(queue pgmq.queue, topic text, msgs jsonb[], headers jsonb[], vt timestamptz)
returns setof bigint
language plpgsql
as $$
begin
  if vt is null then
    raise exception 'a delay must not be null' using errcode = '23502';
  end if;
  -- The log holds no SQL null.
  if vt > clock_timestamp() or array_position(msgs, null) is not null then
    return query
    with sent as (
      insert into pgmq.parked (queue, msg_id, vt, message, headers, fifo)
      select (write.queue).id, nextval(format('pgmb.%I', 'seq_' || (write.queue).stream)::regclass), write.vt,
        one.message, one.headers, pgmq.fifo_of(one.headers)
      from unnest(write.msgs, write.headers) one (message, headers)
      returning parked.msg_id
    )
    select sent.msg_id from sent;
  else
    return query execute 'insert into ' || (write.queue).log || ' as e (topic, key, payload, headers)
      select $1, one.headers ->> ''x-pgmq-group'', one.message::json, one.headers::json
      from unnest($2, $3) one (message, headers)
      returning e.seq'
    using write.topic, write.msgs, write.headers;
  end if;
end $$;

-- Sends a message that may be read from `delay` on, and returns its number. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.send(queue_name text, msg jsonb, headers jsonb, delay timestamptz)
returns setof bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked pgmq.queue := pgmq.queue_for_sender(queue_name);
  given bigint;
begin
  if delay <= clock_timestamp() and msg is not null then
    -- As pgmq.write, for one.
    execute 'insert into ' || asked.log || ' as e (topic, key, payload, headers)
      values ($1, $3 ->> ''x-pgmq-group'', $2::json, $3::json) returning e.seq'
    into given using asked.queue_name, msg, headers;
    return next given;
  else
    return query select * from pgmq.write(asked, asked.queue_name, array[msg], array[headers], delay);
  end if;
end $$;

create or replace function pgmq.send(queue_name text, msg jsonb)
returns setof bigint
language sql
as $$
  select pgmq.send(queue_name, msg, null, pg_catalog.clock_timestamp())
$$;

create or replace function pgmq.send(queue_name text, msg jsonb, headers jsonb)
returns setof bigint
language sql
as $$
  select pgmq.send(queue_name, msg, headers, pg_catalog.clock_timestamp())
$$;

create or replace function pgmq.send(queue_name text, msg jsonb, delay integer)
returns setof bigint
language sql
as $$
  select pgmq.send(queue_name, msg, null, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => delay))
$$;

create or replace function pgmq.send(queue_name text, msg jsonb, delay timestamptz)
returns setof bigint
language sql
as $$
  select pgmq.send(queue_name, msg, null, delay)
$$;

create or replace function pgmq.send(queue_name text, msg jsonb, headers jsonb, delay integer)
returns setof bigint
language sql
as $$
  select pgmq.send(queue_name, msg, headers, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => delay))
$$;

-- Raises unless there are messages, and headers for none or for each. Errors: 22023.
create or replace function pgmq.assert_batch(msgs jsonb[], headers jsonb[])
returns void
language plpgsql immutable
as $$
begin
  if coalesce(cardinality(msgs), 0) = 0 then
    raise exception 'msgs cannot be NULL or empty' using errcode = '22023';
  end if;
  if cardinality(headers) <> cardinality(msgs) then
    raise exception 'headers array length (%) must match msgs array length (%)', cardinality(headers), cardinality(msgs)
      using errcode = '22023';
  end if;
end $$;

-- Sends messages that may be read from `delay` on, and returns their numbers. Errors: 22023 no messages, or arrays of
-- different lengths, 42P01 no such queue, 42501.
create or replace function pgmq.send_batch(queue_name text, msgs jsonb[], headers jsonb[], delay timestamptz)
returns setof bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked pgmq.queue;
begin
  perform pgmq.assert_batch(msgs, headers);
  asked := pgmq.queue_for_sender(queue_name);
  return query select * from pgmq.write(asked, asked.queue_name, msgs, headers, delay);
end $$;

create or replace function pgmq.send_batch(queue_name text, msgs jsonb[])
returns setof bigint
language sql
as $$
  select pgmq.send_batch(queue_name, msgs, null, pg_catalog.clock_timestamp())
$$;

create or replace function pgmq.send_batch(queue_name text, msgs jsonb[], headers jsonb[])
returns setof bigint
language sql
as $$
  select pgmq.send_batch(queue_name, msgs, headers, pg_catalog.clock_timestamp())
$$;

create or replace function pgmq.send_batch(queue_name text, msgs jsonb[], delay integer)
returns setof bigint
language sql
as $$
  select pgmq.send_batch(queue_name, msgs, null, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => delay))
$$;

create or replace function pgmq.send_batch(queue_name text, msgs jsonb[], delay timestamptz)
returns setof bigint
language sql
as $$
  select pgmq.send_batch(queue_name, msgs, null, delay)
$$;

create or replace function pgmq.send_batch(queue_name text, msgs jsonb[], headers jsonb[], delay integer)
returns setof bigint
language sql
as $$
  select pgmq.send_batch(queue_name, msgs, headers, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => delay))
$$;
