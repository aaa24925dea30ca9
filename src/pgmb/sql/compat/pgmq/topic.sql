-- Topics: one send to every queue that is bound to a pattern of its routing key. * stands for one word, # for any text:
-- logs.# is every key that begins with "logs.", as in PGMQ.

-- Raises unless it is a routing key: words of letters, digits, - and _ between dots. Errors: 22023.
create or replace function pgmq.validate_routing_key(routing_key text)
returns boolean
language plpgsql immutable
as $$
begin
  if coalesce(routing_key, '') = '' then
    raise exception 'routing_key cannot be NULL or empty' using errcode = '22023';
  elsif pg_catalog.length(routing_key) > 255 then
    raise exception 'routing_key length cannot exceed 255 characters, got % characters', pg_catalog.length(routing_key)
      using errcode = '22023';
  elsif routing_key !~ '^[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*$' then
    raise exception 'invalid routing key: %', routing_key using errcode = '22023',
      hint = 'Words of letters, digits, hyphens and underscores, with a dot between two.';
  end if;
  return true;
end $$;

-- Raises unless it is a pattern: words of letters, digits, -, _, * and # between dots, no two wildcards side by side.
-- Errors: 22023.
create or replace function pgmq.validate_topic_pattern(pattern text)
returns boolean
language plpgsql immutable
as $$
begin
  if coalesce(pattern, '') = '' then
    raise exception 'pattern cannot be NULL or empty' using errcode = '22023';
  elsif pg_catalog.length(pattern) > 255 then
    raise exception 'pattern length cannot exceed 255 characters, got % characters', pg_catalog.length(pattern)
      using errcode = '22023';
  elsif pattern !~ '^[a-zA-Z0-9_*#-]+(\.[a-zA-Z0-9_*#-]+)*$' or pattern ~ '[*#][*#]' then
    raise exception 'invalid pattern: %', pattern using errcode = '22023',
      hint = 'Words of letters, digits, hyphens, underscores, * and #, with a dot between two; no two wildcards together.';
  end if;
  return true;
end $$;

-- The regular expression of a valid pattern.
create or replace function pgmq.compile_pattern(pattern text)
returns text
language sql immutable
as $$
  select '^' || replace(replace(replace(pattern, '.', '\.'), '*', '[^.]+'), '#', '.*') || '$'
$$;

-- Binds a pattern to a queue: messages sent to a routing key that it matches come to the queue. Binding it again does
-- nothing. Needs the rights of pgmb_admin. Errors: 22023 not a pattern, 42P01 no such queue, 42501.
create or replace function pgmq.bind_topic(pattern text, queue_name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmq.validate_topic_pattern(bind_topic.pattern);
  insert into pgmq.topic_bindings (pattern, queue_name, compiled_regex)
  values (bind_topic.pattern, (pgmq.queue_named(bind_topic.queue_name)).queue_name, pgmq.compile_pattern(bind_topic.pattern))
  on conflict do nothing;
end $$;

-- Removes a binding. True if there was one. Needs the rights of pgmb_admin.
create or replace function pgmq.unbind_topic(pattern text, queue_name text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  if coalesce(unbind_topic.pattern, '') = '' or coalesce(unbind_topic.queue_name, '') = '' then
    raise exception 'pattern and queue_name cannot be NULL or empty' using errcode = '22023';
  end if;
  delete from pgmq.topic_bindings b where b.pattern = unbind_topic.pattern and b.queue_name = unbind_topic.queue_name;
  return found;
end $$;

-- Every binding, the newest first.
create or replace function pgmq.list_topic_bindings()
returns table (pattern text, queue_name text, bound_at timestamptz, compiled_regex text)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select b.pattern, b.queue_name, b.bound_at, b.compiled_regex from pgmq.topic_bindings b
  order by b.bound_at desc, b.pattern, b.queue_name
$$;

-- The bindings of a queue, the newest first.
create or replace function pgmq.list_topic_bindings(queue_name text)
returns table (pattern text, queue_name text, bound_at timestamptz, compiled_regex text)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select b.pattern, b.queue_name, b.bound_at, b.compiled_regex from pgmq.topic_bindings b
  where b.queue_name = list_topic_bindings.queue_name
  order by b.bound_at desc, b.pattern
$$;

-- The bindings that a routing key matches. Errors: 22023 not a routing key.
create or replace function pgmq.test_routing(routing_key text)
returns table (pattern text, queue_name text, compiled_regex text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmq.validate_routing_key(routing_key);
  return query
  select b.pattern, b.queue_name, b.compiled_regex from pgmq.topic_bindings b
  where routing_key ~ b.compiled_regex order by b.pattern, b.queue_name;
end $$;

-- The names of the queues that a routing key leads to.
create or replace function pgmq.route(routing_key text)
returns setof text
language sql stable
as $$
  select distinct b.queue_name from pgmq.topic_bindings b where routing_key ~ b.compiled_regex order by b.queue_name
$$;

-- Sends messages to every queue bound to the routing key, each once. The caller must be allowed to send to all of them.
-- Errors: 22023 not a routing key, no messages or arrays of different lengths, 42501.
create or replace function pgmq.send_batch_topic(routing_key text, msgs jsonb[], headers jsonb[], delay timestamptz)
returns table (queue_name text, msg_id bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  bound text;
begin
  perform pgmq.validate_routing_key(routing_key);
  perform pgmq.assert_batch(msgs, headers);
  for bound in select * from pgmq.route(routing_key) loop
    return query
    select bound, sent from pgmq.write(pgmq.queue_for_sender(bound), routing_key, msgs, headers, delay) sent;
  end loop;
end $$;

create or replace function pgmq.send_batch_topic(routing_key text, msgs jsonb[])
returns table (queue_name text, msg_id bigint)
language sql
as $$
  select * from pgmq.send_batch_topic(routing_key, msgs, null, pg_catalog.clock_timestamp())
$$;

create or replace function pgmq.send_batch_topic(routing_key text, msgs jsonb[], headers jsonb[])
returns table (queue_name text, msg_id bigint)
language sql
as $$
  select * from pgmq.send_batch_topic(routing_key, msgs, headers, pg_catalog.clock_timestamp())
$$;

create or replace function pgmq.send_batch_topic(routing_key text, msgs jsonb[], delay integer)
returns table (queue_name text, msg_id bigint)
language sql
as $$
  select * from pgmq.send_batch_topic(routing_key, msgs, null, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => delay))
$$;

create or replace function pgmq.send_batch_topic(routing_key text, msgs jsonb[], delay timestamptz)
returns table (queue_name text, msg_id bigint)
language sql
as $$
  select * from pgmq.send_batch_topic(routing_key, msgs, null, delay)
$$;

create or replace function pgmq.send_batch_topic(routing_key text, msgs jsonb[], headers jsonb[], delay integer)
returns table (queue_name text, msg_id bigint)
language sql
as $$
  select * from pgmq.send_batch_topic(routing_key, msgs, headers, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => delay))
$$;

-- Sends a message to every queue bound to the routing key, each once, and returns how many. Errors: 22023, 42501.
create or replace function pgmq.send_topic(routing_key text, msg jsonb, headers jsonb, delay integer)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if msg is null then
    raise exception 'msg cannot be NULL' using errcode = '22023';
  elsif delay < 0 then
    raise exception 'delay cannot be negative, got: %', delay using errcode = '22023';
  end if;
  return (select count(*) from pgmq.send_batch_topic(routing_key, array[msg], array[headers], delay));
end $$;

create or replace function pgmq.send_topic(routing_key text, msg jsonb)
returns integer
language sql
as $$
  select pgmq.send_topic(routing_key, msg, null, 0)
$$;

create or replace function pgmq.send_topic(routing_key text, msg jsonb, delay integer)
returns integer
language sql
as $$
  select pgmq.send_topic(routing_key, msg, null, delay)
$$;

-- With headers and no delay: its client calls it, PGMQ itself has it not.
create or replace function pgmq.send_topic(routing_key text, msg jsonb, headers jsonb)
returns integer
language sql
as $$
  select pgmq.send_topic(routing_key, msg, headers, 0)
$$;
