-- Sessions ------------------------------------------------------------------------------------------------------

local function tenant_key(tenant) return P .. 'tenant:' .. tenant end
local function intent_key(tenant, intent) return P .. 'intent:' .. #tenant .. ':' .. tenant .. ':' .. intent end

local function load_session(id)
  local v = call('HMGET', P .. 'session:' .. id, 'tenant', 'intent', 'space', 'tags', 'width', 'running', 'resident',
    'closing', 'length', 'mark')
  if not v[1] then return nil end
  return {id = id, mark = v[10] or '', tenant = v[1], intent = v[2], space = v[3], tags = v[4], width = tonumber(v[5]),
    running = tonumber(v[6]), resident = tonumber(v[7]), closing = v[8] == '1', length = tonumber(v[9])}
end

local function new_session(id, tenant, intent)
  return {id = id, mark = '', tenant = tenant, intent = intent, space = '', tags = '', width = 8, running = 0, resident = 0,
    closing = false, length = 0, new = true}
end

local function chain_of(s) return call('GET', P .. 'chain:' .. s.id) or '' end

local function save_session(s)
  local key = P .. 'session:' .. s.id
  write('HSET', key, 'tenant', s.tenant, 'intent', s.intent, 'space', s.space, 'tags', s.tags, 'width', s.width,
    'running', s.running, 'resident', s.resident, 'closing', s.closing and '1' or '0', 'length', s.length,
    'mark', s.mark)
  if s.new then write('HSET', key, 'since', now, 'turns', 0) end
end

local function touch(s, used)
  used = used or now
  write('ZADD', P .. 'recent', used, s.id)
  write('ZADD', tenant_key(s.tenant), used, s.id)
  if s.intent ~= '' then write('ZADD', intent_key(s.tenant, s.intent), used, s.id) end
  if s.resident > 0 then write('ZADD', P .. 'resident', used, s.id) end
end

local function set_intent(s, intent)
  if intent == '' or intent == s.intent then return end
  if s.intent ~= '' then write('ZREM', intent_key(s.tenant, s.intent), s.id) end
  s.intent = intent
end

-- At most once for a tenant before each settle(). A tenant without chunks leaves nothing behind.
local function count_tenant(s, chunks)
  if chunks == 0 then return end
  local n = tonumber(call('HGET', P .. 'tenants', s.tenant) or '0') + chunks
  if n == 0 then write('HDEL', P .. 'tenants', s.tenant) else write('HSET', P .. 'tenants', s.tenant, n) end
end

-- Leading chunks that two chains have in common: exact, and in as many reads as the logarithm of their length.
local function in_common(key, packed, width, n)
  if n == 0 then return 0 end
  if call('GETRANGE', key, 0, n * width - 1) == string.sub(packed, 1, n * width) then return n end
  local low, high = 0, n
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if call('GETRANGE', key, low * width, middle * width - 1)
        == string.sub(packed, low * width + 1, middle * width) then low = middle else high = middle end
  end
  return low
end

-- A session lets go of chunks first..last of its chain; while a request of its own runs they are kept in limbo.
local function let_go(s, packed, first, last, residents)
  if last < first then return end
  if s.running == 0 then
    change_all(s.space, s.tags, s.width, packed, first, last, -1, residents)
  else
    local part = string.sub(packed, (first - 1) * s.width + 1, last * s.width)
    local counted = math.min(math.max(residents - first + 1, 0), last - first + 1)
    write('RPUSH', P .. 'limbo:' .. s.id, bag(s.space, s.tags, s.width, part, counted))
  end
end

-- The session's chain becomes the one of `new`: {packed, width, space, tags, from, mark}; `packed` holds what comes
-- behind the first `from` chunks, which are known to be those of the old one. All of it has just been in use, so all
-- of it is taken for resident.
local function set_chain(s, new)
  local key, width, common = P .. 'chain:' .. s.id, new.width, new.from
  local added = #new.packed / width
  local n = common + added
  if common == 0 and s.width == width and s.space == new.space then
    common = in_common(key, new.packed, width, math.min(s.length, n))
  end
  local behind = common - new.from
  if s.length > common then
    let_go(s, call('GETRANGE', key, common * s.width, -1), 1, s.length - common, s.resident - common)
  end
  local residents = budget > 0 and n or 0
  local low, high = math.min(s.resident, common), math.min(residents, common)
  if low ~= high then
    local first, last = math.min(low, high) + 1, math.max(low, high)
    local part = call('GETRANGE', key, (first - 1) * width, last * width - 1)
    for i = 1, last - first + 1 do change(new.space, new.tags, at(part, width, i), 0, high > low and 1 or -1) end
  end
  change_all(new.space, new.tags, width, new.packed, behind + 1, added, 1, residents > 0 and added or 0)
  if common > 0 and n >= s.length then
    if added > behind then write('SETRANGE', key, common * width, string.sub(new.packed, behind * width + 1)) end
  elseif new.from > 0 then
    write('SET', key, call('GETRANGE', key, 0, new.from * width - 1) .. new.packed)
  elseif n > 0 then
    write('SET', key, new.packed)
  else
    write('DEL', key)
  end
  count_tenant(s, n - s.length)
  s.before, s.common = s.length, common
  s.space, s.tags, s.width, s.length, s.resident, s.mark = new.space, new.tags, width, n, residents, new.mark
  if residents == 0 then write('ZREM', P .. 'resident', s.id) end
end

local function forget(s)
  write('DEL', P .. 'session:' .. s.id, P .. 'chain:' .. s.id, P .. 'limbo:' .. s.id)
end

local function empty_limbo(s)
  for _, text in ipairs(call('LRANGE', P .. 'limbo:' .. s.id, 0, -1)) do
    local space, tags, width, packed, residents = unbag(text)
    change_all(space, tags, width, packed, 1, #packed / width, -1, residents)
  end
  write('DEL', P .. 'limbo:' .. s.id)
end

local function close_session(s)
  if not s.closing then
    let_go(s, chain_of(s), 1, s.length, s.resident)
    count_tenant(s, -s.length)
    write('ZREM', P .. 'recent', s.id)
    write('ZREM', P .. 'resident', s.id)
    write('ZREM', tenant_key(s.tenant), s.id)
    if s.intent ~= '' then write('ZREM', intent_key(s.tenant, s.intent), s.id) end
  end
  if s.running == 0 then
    empty_limbo(s)
    forget(s)
  else
    s.closing, s.length, s.resident, s.mark = true, 0, 0, ''
    write('DEL', P .. 'chain:' .. s.id)
    save_session(s)
  end
end

-- Requests ------------------------------------------------------------------------------------------------------

local function load_request(id)
  if id == '' then return nil end
  local v = call('HMGET', P .. 'request:' .. id, 'session', 'intent', 'tenant', 'bag')
  if not v[1] then return nil end
  return {id = id, session = v[1], intent = v[2], tenant = v[3], bag = v[4]}
end

-- A running request ends; `s`: its session, if it has one. What only the request held is let go of.
local function end_request(request, s)
  if request.bag ~= '' then
    local space, tags, width, packed, residents = unbag(request.bag)
    change_all(space, tags, width, packed, 1, #packed / width, -1, residents)
  end
  write('DEL', P .. 'request:' .. request.id)
  write('ZREM', P .. 'running', request.id)
  if s then
    s.running = math.max(0, s.running - 1)
    if s.running == 0 then empty_limbo(s) end
  end
end

-- Room ----------------------------------------------------------------------------------------------------------

local function oldest(key, protected)
  for _, id in ipairs(call('ZRANGE', key, 0, SCAN - 1)) do
    if not protected[id] then
      local s = load_session(id)
      if s and s.running == 0 then return s end
    end
  end
end

-- DDR is short: the sessions that were used the longest ago give up their tails, and keep them on slower tiers.
local function make_room(protected)
  if budget == 0 then return end
  for _ = 1, 4 * SCAN do
    local short = tonumber(call('HGET', P .. 'totals', 'resident') or '0') - budget
    if short <= 0 then return end
    local s = oldest(P .. 'resident', protected)
    if not s then return end
    local keep = math.max(0, s.resident - short)
    local tail = call('GETRANGE', P .. 'chain:' .. s.id, keep * s.width, s.resident * s.width - 1)
    for i = 1, s.resident - keep do change(s.space, s.tags, at(tail, s.width, i), 0, -1) end
    write('HSET', P .. 'session:' .. s.id, 'resident', keep)
    if keep == 0 then write('ZREM', P .. 'resident', s.id) end
    settle(true)
  end
end

-- The ledger's own limits: the least recently used sessions go. True when one had to.
local function shed(tenant, protected)
  local sessions, chunks = tonumber(A.tenant_sessions or '0'), tonumber(A.tenant_chunks or '0')
  local victim
  if tenant and ((sessions > 0 and call('ZCARD', tenant_key(tenant)) > sessions)
      or (chunks > 0 and tonumber(call('HGET', P .. 'tenants', tenant) or '0') > chunks)) then
    victim = oldest(tenant_key(tenant), protected)
  elseif call('ZCARD', P .. 'recent') > tonumber(A.max_sessions) then
    victim = oldest(P .. 'recent', protected)
  end
  if not victim then return false end
  close_session(victim)
  write('HINCRBY', P .. 'totals', 'shed', 1)
  settle()
  return true
end

local function make_all_room(tenant, protected)
  for _ = 1, 8 do if not shed(tenant, protected) then break end end
  make_room(protected)
end

