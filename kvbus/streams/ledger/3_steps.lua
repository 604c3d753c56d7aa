-- Steps ---------------------------------------------------------------------------------------------------------

local function later(a, b)
  local a_ms, a_nr = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_nr = string.match(b, '^(%d+)-(%d+)$')
  a_ms, a_nr, b_ms, b_nr = tonumber(a_ms), tonumber(a_nr), tonumber(b_ms), tonumber(b_nr)
  return a_ms > b_ms or (a_ms == b_ms and a_nr > b_nr)
end

-- False when this entry was taken already, here or by another process. Otherwise the place moves with the step.
local function take_entry()
  local cursor = call('HGET', POSITION, 'cursor')
  if cursor and not later(A.entry, cursor) then return false end
  write('HSET', POSITION, 'cursor', A.entry, 'at', A.at, 'entries', A.entries)
  return true
end

-- (fresh, how many events of this publisher are missing before this one)
local function take_seq()
  local epoch, seq = tonumber(A.epoch), tonumber(A.seq)
  local seen, hole = call('HGET', P .. 'seen', A.publisher), 0
  if seen then
    local old_epoch, next_seq = string.match(seen, '^(%d+) (%d+)$')
    old_epoch, next_seq = tonumber(old_epoch), tonumber(next_seq)
    if epoch < old_epoch or (epoch == old_epoch and seq < next_seq) then return false, 0 end
    hole = epoch == old_epoch and seq - next_seq or seq
  end
  write('HSET', P .. 'seen', A.publisher, A.epoch .. ' ' .. integer(seq + 1))
  return true, hole
end

local function was_closed(id)
  local at_ms = call('ZSCORE', P .. 'closed', id)
  return at_ms and tonumber(at_ms) + tonumber(A.closed_ms) > now
end

local function answer(status, ...) return {status, issued, ...} end

local steps = {}

-- `packed` may hold only what follows the first `from` chunks of the chain that the event `base` brought. If that is
-- not the chain that the session has, nothing is done, and the whole chain is asked for.
function steps.turn()
  if not take_entry() then return answer('REPEAT') end
  local fresh, hole = take_seq()
  if not fresh then
    settle()
    return answer('REPEAT')
  end
  local request = load_request(A.request) or load_request(A.external)
  local id = request and request.session ~= '' and request.session or A.session
  local tenant = request and request.session ~= '' and request.tenant or A.tenant
  local intent = request and request.intent ~= '' and request.intent or A.intent
  local s = id ~= '' and load_session(id) or nil
  if A.from ~= '0' and (not s or s.closing or s.mark ~= A.base or s.width ~= tonumber(A.width)) then return answer('WHOLE') end
  local own = request and request.session == id and s or nil
  local status, before = 'TURN', ''
  if s and s.tenant ~= tenant then
    status = 'FOREIGN'
  elseif id == '' then
    status = 'ANONYMOUS'
  elseif (s and s.closing) or (not s and was_closed(id)) then
    -- A late event: nobody holds what it brought, unless others do.
    status = 'LATE'
    for i = 1, #A.packed / tonumber(A.width) do
      change(A.space, A.tags, at(A.packed, tonumber(A.width), i), 0, 0).orphan = true
    end
  end
  if request then end_request(request, own) end
  if status == 'TURN' then
    s = s or new_session(id, tenant, intent)
    set_intent(s, intent)
    if A.debug == '1' then before = chain_of(s) end
    local before_width = s.width
    if A.changes == '1' then
      set_chain(s, {packed = A.packed, width = tonumber(A.width), space = A.space, tags = A.tags,
        from = tonumber(A.from), mark = A.mark})
    end
    save_session(s)
    write('HINCRBY', P .. 'session:' .. id, 'turns', 1)
    touch(s)
    settle()
    evict_due(256)
    make_all_room(s.tenant, {[id] = true})
    return answer(status, integer(hole), s.before or s.length, s.common or s.length, s.length, before, before_width, id)
  end
  if own and own.closing and own.running == 0 then forget(own) elseif own then save_session(own) end
  settle()
  return answer(status, integer(hole), id)
end

-- A request begins: until it ends, or its time is over, nothing that it or its session holds is evicted.
function steps.begin()
  if load_request(A.request) then
    call('ZADD', P .. 'running', integer(now + A.request_ms), A.request)
    return answer('ALREADY')
  end
  local s = A.session ~= '' and (load_session(A.session) or new_session(A.session, A.tenant, A.intent)) or nil
  if s and s.tenant ~= A.tenant then return answer('FOREIGN') end
  local width, common, residents = tonumber(A.width), 0, 0
  if s then
    write('ZREM', P .. 'closed', s.id)
    s.closing = false
    set_intent(s, A.intent)
    if s.space == A.space and s.width == width then
      common = in_common(P .. 'chain:' .. s.id, A.packed, width, math.min(s.length, #A.packed / width))
    end
    if budget > 0 and s.resident < s.length then
      local rest = call('GETRANGE', P .. 'chain:' .. s.id, s.resident * s.width, -1)
      for i = 1, s.length - s.resident do change(s.space, s.tags, at(rest, s.width, i), 0, 1) end
      s.resident = s.length
    end
    s.running = s.running + 1
    save_session(s)
    touch(s)
  end
  local own = string.sub(A.packed, common * width + 1)
  residents = budget > 0 and #own / width or 0
  change_all(A.space, A.tags, width, own, 1, #own / width, 1, residents)
  write('HSET', P .. 'request:' .. A.request, 'session', A.session, 'intent', A.intent, 'tenant', A.tenant, 'bag',
    own ~= '' and bag(A.space, A.tags, width, own, residents) or '')
  write('ZADD', P .. 'running', now + A.request_ms, A.request)
  settle()
  make_all_room(s and s.tenant, {[A.session] = true})
  return answer('BEGUN')
end

function steps.close()
  local s = load_session(A.session)
  if not s or s.closing then return answer('UNKNOWN') end
  if A.tenant and A.tenant ~= s.tenant then return answer('FOREIGN') end
  local length = s.length
  write('ZADD', P .. 'closed', now, s.id)
  close_session(s)
  settle()
  return answer('CLOSED', length)
end

-- Chunks of sessions in their order, each once, at most `room`, grouped by their tags; then sent.
local function prefetch(sessions, room)
  local groups, listed, n = {}, {}, 0
  for _, s in ipairs(sessions) do
    local chain = chain_of(s)
    for i = 1, s.length do
      if n >= room then break end
      local hash = at(chain, s.width, i)
      if not listed[s.space .. hash] then
        listed[s.space .. hash] = true
        collect(groups, {0, 0, s.space, s.tags, hash})
        n = n + 1
      end
    end
  end
  for _, group in ipairs(groups) do send('prefetch', 'prefetch', group.tags, group.hashes) end
  return n
end

function steps.switch()
  local ids = {A.session}
  if A.session == '' then ids = call('ZREVRANGE', intent_key(A.tenant, A.intent), 0, SCAN - 1) end
  local sessions, protected = {}, {}
  for _, id in ipairs(ids) do
    local s = load_session(id)
    if s and not s.closing then
      if s.tenant ~= A.tenant then return answer('FOREIGN') end
      sessions[#sessions + 1] = s
      protected[id] = true
    end
  end
  if #sessions == 0 then return answer('UNKNOWN') end
  local room = budget > 0 and budget or 65536
  local left = budget
  for place, s in ipairs(sessions) do
    local resident = math.min(s.length, math.max(s.resident, left))
    left = math.max(0, left - s.length)
    if resident > s.resident then
      local part = call('GETRANGE', P .. 'chain:' .. s.id, s.resident * s.width, resident * s.width - 1)
      for i = 1, resident - s.resident do change(s.space, s.tags, at(part, s.width, i), 0, 1) end
      s.resident = resident
      write('HSET', P .. 'session:' .. s.id, 'resident', resident)
    end
    touch(s, now - place + 1)  -- all are new now, and stay in their order
  end
  settle()
  make_room(protected)
  local n = prefetch(sessions, room)
  return answer('SWITCHED', #sessions, n)
end

-- A worker has started empty, or has missed commands: it gets the newest sessions, and the evicts that still hold.
function steps.reissue()
  if not take_entry() then return answer('REPEAT') end
  if A.evicts == '1' then
    local groups, listed = {}, {}
    for _, text in ipairs(call('LRANGE', P .. 'sent', 0, -1)) do
      local space, tags, width, packed = unbag(string.match(text, '^%S+ (.*)$'))
      for i = 1, #packed / width do
        local hash = at(packed, width, i)
        local node = space .. hash
        if not listed[node] and not call('HGET', bucket(node), node) then
          listed[node] = true
          collect(groups, {0, 0, space, tags, hash})
        end
      end
    end
    for _, group in ipairs(groups) do send('evict', 'evict', group.tags, group.hashes) end
  end
  local sessions = {}
  for _, id in ipairs(call('ZREVRANGE', P .. 'recent', 0, tonumber(A.hot) - 1)) do
    local s = load_session(id)
    if s then sessions[#sessions + 1] = s end
  end
  local n = prefetch(sessions, budget > 0 and budget or 65536)
  settle()
  return answer('REISSUED', n)
end

-- A worker could not carry out an evict of ours: chunks were in use, or it came too late. They are doomed once more, and
-- the ledger decides anew when that is due. packed: which chunks, none for all of that command.
function steps.again()
  local listed
  if A.packed ~= '' then
    listed = {}
    for i = 1, #A.packed / tonumber(A.width) do listed[at(A.packed, tonumber(A.width), i)] = true end
  end
  for _, text in ipairs(call('LRANGE', P .. 'sent', 0, -1)) do
    local id, rest = string.match(text, '^(%S+) (.*)$')
    if id == A.command then
      local groups = {}
      local space, tags, width, packed = unbag(rest)
      for i = 1, #packed / width do
        local hash = at(packed, width, i)
        if (not listed or listed[hash]) and not call('HGET', bucket(space .. hash), space .. hash) then
          collect(groups, {0, 0, space, tags, hash})
        end
      end
      doom(groups, tonumber(A.retry_ms))
      local n = groups[1] and #groups[1].hashes or 0
      settle()
      return answer('DOOMED', n)
    end
  end
  return answer('UNKNOWN', 0)
end

-- Another kind of event: only the place moves.
function steps.pass()
  if not take_entry() then return answer('REPEAT') end
  settle()
  return answer('PASSED')
end

-- The stream's history is another one than that of the place: begin at the place given.
function steps.rewind()
  if (call('HGET', POSITION, 'cursor') or '') ~= A.expected then return answer('REPEAT') end
  call('HSET', POSITION, 'cursor', A.entry, 'at', A.at, 'entries', A.entries)
  return answer('REWOUND')
end

-- What time has overtaken: requests that never ended, idle sessions, more sessions than may be, old tombstones.
function steps.sweep()
  local done = 0
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'running', '-inf', integer(now), 'LIMIT', 0, 16)) do
    local request = load_request(id)
    if request then
      local s = request.session ~= '' and load_session(request.session) or nil
      end_request(request, s)
      if s and s.closing and s.running == 0 then forget(s) elseif s then save_session(s) end
    else
      write('ZREM', P .. 'running', id)
    end
    settle()
    done = done + 1
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'recent', '-inf', integer(now - A.ttl_ms), 'LIMIT', 0, SCAN)) do
    local s = load_session(id)
    if s and s.running == 0 then
      close_session(s)
      write('HINCRBY', P .. 'totals', 'expired', 1)
      settle()
      done = done + 1
    end
  end
  for _ = 1, 8 do
    if not shed(nil, {}) then break end
    done = done + 1
  end
  call('ZREMRANGEBYSCORE', P .. 'closed', '-inf', integer(now - A.closed_ms))
  done = done + evict_due(1024)
  make_room({})
  return answer('SWEPT', done)
end

return steps[A.op]()
