-- The session ledger: one call is one step, all of it or nothing, the commands that follow from it included.
--
-- KEYS[1] the commands stream, KEYS[2] <prefix>memory:position; all other keys share their slot and prefix.
-- ARGV    names and values in turn; `op` says which step.
--
-- chunks:<bucket>   hash   space..hash -> holds + residents * R. Small hashes are packed: some 15 bytes a chunk.
-- chain:<session>   string the session's hashes in order, each `width` bytes
-- session:<session> hash   tenant, intent, space, tags, width, running, resident (leading chunks held in DDR), ...
-- limbo:<session>   list   what it dropped while a request of its own still ran ("bags")
-- request:<id>      hash   a running request: session, intent, tenant, bag of the chunks that only it holds
-- recent, tenant:<t>, intent:<t>:<i>, resident   sorted sets of sessions by last use
-- running, closed   sorted sets: request -> deadline, session -> when it was closed
-- doomed            sorted set: chunks that nobody holds -> when they are evicted, unless they are held again
-- evicted           sorted set: chunks whose evict may still wait in a worker -> when it was sent
-- totals, tenants, seen, sent   counters; chunks a tenant; next seq a publisher; the newest evicts
local call = redis.call
local A = {}
for i = 1, #ARGV, 2 do A[ARGV[i]] = ARGV[i + 1] end
local COMMANDS, POSITION = KEYS[1], KEYS[2]
local P = string.sub(POSITION, 1, -#'position' - 1)
local R = 1048576
local PER_COMMAND, KEEP_SENT, SCAN = 16384, 256, 64
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local budget, grace = tonumber(A.budget), tonumber(A.grace_ms)

local function integer(n) return string.format('%d', n) end

-- What is to be written waits until every command stands in the stream: should that fail, nothing has happened.
local queue = {}
local function write(...)
  local command = {...}
  for i, value in ipairs(command) do
    if type(value) == 'number' then command[i] = integer(value) end
  end
  queue[#queue + 1] = command
end

-- Commands ------------------------------------------------------------------------------------------------------

local issued, sent_count = {}, 0

local function big_endian(n, bytes)
  local out = {}
  for i = bytes, 1, -1 do
    out[i] = string.char(n % 256)
    n = math.floor(n / 256)
  end
  return table.concat(out)
end

local function wire(hash)
  if #hash == 8 then return '\211' .. hash end
  if #hash == 9 then return '\207' .. string.sub(hash, 2) end
  return '\196\32' .. hash
end

-- A msgpack map, put together by hand: a 64-bit integer does not survive a Lua number. Returns the last one's id.
local function send(kind, form, tags, hashes)
  for first = 1, #hashes, PER_COMMAND do
    local last = math.min(first + PER_COMMAND - 1, #hashes)
    local list = {'\221', big_endian(last - first + 1, 4)}
    for i = first, last do list[#list + 1] = wire(hashes[i]) end
    list = table.concat(list)
    local body = string.char(128 + tonumber(A[form .. '_pairs']) + (tags ~= '' and 3 or 2)) .. A[form]
      .. '\172issued_at_ms\207' .. big_endian(now, 8) .. (tags ~= '' and '\164tags' .. tags or '')
      .. '\172chunk_hashes' .. list
    local id = A.token .. (sent_count > 0 and '-' .. sent_count or '')
    sent_count = sent_count + 1
    if A.maxlen == '0' then
      call('XADD', COMMANDS, '*', 'v', '1', 'type', kind, 'id', id, 'body', body)
    else
      call('XADD', COMMANDS, 'MAXLEN', '~', A.maxlen, '*', 'v', '1', 'type', kind, 'id', id, 'body', body)
    end
    for _, value in ipairs({form, id, list}) do issued[#issued + 1] = value end
  end
  return issued[#issued - 1]
end

-- Chunks --------------------------------------------------------------------------------------------------------

local function bucket(node)
  local n = #node
  return P .. 'chunks:' .. string.byte(node, n) % 64 * 256 + string.byte(node, n - 1)
end

-- Hash number i of a packed chain; a width other than 8 means a length byte, the hash, and padding.
local function at(packed, width, i)
  local hash = string.sub(packed, (i - 1) * width + 1, i * width)
  if width == 8 then return hash end
  return string.sub(hash, 2, 1 + string.byte(hash, 1))
end

local function bag(space, tags, width, packed, residents)
  return #space .. ' ' .. #tags .. ' ' .. width .. ' ' .. residents .. ' ' .. space .. tags .. packed
end

local function unbag(text)
  local a, b, width, residents, from = string.match(text, '^(%d+) (%d+) (%d+) (%d+) ()')
  a, b = tonumber(a), tonumber(b)
  return string.sub(text, from, from + a - 1), string.sub(text, from + a, from + a + b - 1), tonumber(width),
    string.sub(text, from + a + b), tonumber(residents)
end

-- What this step does to each chunk, net: [holds, residents, space, tags, hash, orphan].
local changes, order = {}, {}
local function change(space, tags, hash, holds, residents)
  local node = space .. hash
  local c = changes[node]
  if not c then
    c = {0, 0, space, tags, hash}
    changes[node] = c
    order[#order + 1] = node
  end
  c[1] = c[1] + holds
  c[2] = c[2] + residents
  return c
end

-- Chunks `first` to `last` of a packed chain, of which the leading `residents` are counted as resident.
local function change_all(space, tags, width, packed, first, last, sign, residents)
  for i = first, last do
    change(space, tags, at(packed, width, i), sign, i <= residents and sign or 0)
  end
end

local function collect(groups, c)
  local group = groups[c[3]]
  if not group then
    group = {space = c[3], tags = c[4], hashes = {}}
    groups[c[3]] = group
    groups[#groups + 1] = group
  end
  group.hashes[#group.hashes + 1] = c[5]
end

-- Chunks that nobody holds leave every tier. What was sent is remembered: for a worker that missed it, and for chunks
-- that a worker could not remove.
local function evict(groups)
  for _, group in ipairs(groups) do
    for first = 1, #group.hashes, PER_COMMAND do
      local width, slice, parts = 8, {}, {}
      for i = first, math.min(first + PER_COMMAND - 1, #group.hashes) do slice[#slice + 1] = group.hashes[i] end
      for _, hash in ipairs(slice) do if #hash ~= 8 then width = 33 end end
      for i, hash in ipairs(slice) do
        parts[i] = width == 8 and hash or string.char(#hash) .. hash .. string.rep('\0', 32 - #hash)
      end
      local id = send('evict', 'evict', group.tags, slice)
      for _, hash in ipairs(slice) do write('ZADD', P .. 'evicted', now, group.space .. hash) end
      write('LPUSH', P .. 'sent', id .. ' ' .. bag(group.space, group.tags, width, table.concat(parts), 0))
    end
    write('LTRIM', P .. 'sent', 0, KEEP_SENT - 1)
  end
end

-- The same after a delay, if they are not held again by then: a request that nobody announced may be using them.
local function doom(groups, delay)
  for _, group in ipairs(groups) do
    for i, hash in ipairs(group.hashes) do
      local width = #hash == 8 and 8 or 33
      local packed = width == 8 and hash or string.char(#hash) .. hash
      -- The fraction keeps their order.
      write('ZADD', P .. 'doomed', string.format('%.4f', now + delay + i * 0.00025),
        bag(group.space, group.tags, width, packed, 0))
    end
  end
end

-- An evict waits in a worker while a request has its chunk pinned. If that request's event then names the chunk, a
-- prefetch takes the waiting evict back: for each chunk the later command counts.
local function take_back()
  if call('ZCARD', P .. 'evicted') == 0 then return end
  call('ZREMRANGEBYSCORE', P .. 'evicted', '-inf', integer(now - A.evict_ttl_ms))
  local groups = {}
  for _, node in ipairs(order) do
    local c = changes[node]
    if c[1] > 0 and call('ZSCORE', P .. 'evicted', node) then
      collect(groups, c)
      write('ZREM', P .. 'evicted', node)
    end
  end
  for _, group in ipairs(groups) do send('prefetch', 'prefetch', group.tags, group.hashes) end
end

-- Ends a step: first the commands that follow from the changes, then the changes, then what else was queued.
-- demote: chunks that are still held but no longer resident leave DDR.
local function settle(demote)
  local gone, cold, lost = {}, {}, {}
  local chunks, ddr = 0, 0
  for i = #order, 1, -1 do  -- the tail first: a suffix without its prefix is of no use
    local c = changes[order[i]]
    if c[1] < 0 or c[2] < 0 or c.orphan then
      local node = order[i]
      local value = tonumber(call('HGET', bucket(node), node) or '0')
      local holds, residents = value % R + c[1], math.max(0, math.floor(value / R) + c[2])
      if holds <= 0 then
        if value > 0 or c.orphan then collect(gone, c) end
        if value > 0 then lost[node] = 0 end
        chunks = chunks - (value > 0 and 1 or 0)
        ddr = ddr - (value >= R and 1 or 0)
      else
        lost[node] = holds + residents * R
        if value >= R and residents == 0 then
          ddr = ddr - 1
          if demote then collect(cold, c) end
        elseif value < R and residents > 0 then
          ddr = ddr + 1
        end
        if value == 0 then chunks = chunks + 1 end
      end
    end
  end
  take_back()
  if grace > 0 then doom(gone, grace) else evict(gone) end
  for _, group in ipairs(cold) do send('evict', 'demote', group.tags, group.hashes) end
  for _, node in ipairs(order) do
    local c, value = changes[node], lost[node]
    if value == 0 then
      call('HDEL', bucket(node), node)
    elseif value then
      call('HSET', bucket(node), node, integer(value))
    elseif (c[1] > 0 or c[2] > 0) and c[1] >= 0 and c[2] >= 0 then
      local step = c[1] + c[2] * R
      value = call('HINCRBY', bucket(node), node, integer(step))
      if value == step then chunks = chunks + 1 end
      if value >= R and value - step < R then ddr = ddr + 1 end
    end
  end
  if chunks ~= 0 then write('HINCRBY', P .. 'totals', 'chunks', chunks) end
  if ddr ~= 0 then write('HINCRBY', P .. 'totals', 'resident', ddr) end
  for _, command in ipairs(queue) do call(unpack(command)) end
  queue, changes, order = {}, {}, {}
end

-- What was doomed, is due, and is still held by nobody goes. Returns how many were looked at.
local function evict_due(most)
  local due = call('ZRANGEBYSCORE', P .. 'doomed', '-inf', integer(now), 'LIMIT', 0, most)
  if #due == 0 then return 0 end
  local groups = {}
  for _, text in ipairs(due) do
    local space, tags, width, packed = unbag(text)
    local hash = at(packed, width, 1)
    if not call('HGET', bucket(space .. hash), space .. hash) then collect(groups, {0, 0, space, tags, hash}) end
    write('ZREM', P .. 'doomed', text)
  end
  evict(groups)
  settle()
  return #due
end
