-- Decodes entries of a kvbus stream on the server: `redis-cli --eval read.lua KEY , CURSOR COUNT`.
-- Answers one line an entry or result, columns apart by tabs. redis-cli alone cannot read msgpack, the server's Lua
-- can, but a 64-bit hash does not fit into its numbers: hashes are made into text from their bytes.
local HEX = '0123456789abcdef'

local function hex_of(bytes)
  return (bytes:gsub('.', function(c)
    local b = c:byte()
    return HEX:sub(math.floor(b / 16) + 1, math.floor(b / 16) + 1) .. HEX:sub(b % 16 + 1, b % 16 + 1)
  end))
end

-- Eight bytes as a hash's text: signed hexadecimal without padding.
local function integer_text(bytes, signed)
  local sign = ''
  if signed and bytes:byte(1) >= 128 then
    sign = '-'
    local carry, out = 1, {}
    for i = #bytes, 1, -1 do
      local b = 255 - bytes:byte(i) + carry
      carry = b > 255 and 1 or 0
      out[i] = string.char(b % 256)
    end
    bytes = table.concat(out)
  end
  local text = hex_of(bytes):gsub('^0+', '')
  return text == '' and '0' or sign .. text
end

local function number(bytes)
  local n = 0
  for i = 1, #bytes do n = n * 256 + bytes:byte(i) end
  return n
end

local decode

local function many(data, at, n, map, hashes)
  local out = {}
  for i = 1, n do
    local key, value = i, nil
    if map then key, at = decode(data, at) end
    value, at = decode(data, at, map and key == 'chunk_hashes' or hashes)
    out[key] = value
  end
  return out, at
end

-- (value, place behind it). hashes: integers become hash texts.
function decode(data, at, hashes)
  local b = data:byte(at)
  local function take(size) return data:sub(at + 1, at + size), at + 1 + size end
  local function sized(size)
    local raw = data:sub(at + 1, at + size)
    at = at + size
    return number(raw)
  end
  if b < 128 then return hashes and string.format('%x', b) or b, at + 1 end
  if b < 144 then return many(data, at + 1, b - 128, true, hashes) end
  if b < 160 then return many(data, at + 1, b - 144, false, hashes) end
  if b < 192 then return take(b - 160) end
  if b == 192 then return false, at + 1 end
  if b == 194 or b == 195 then return b == 195, at + 1 end
  if b >= 196 and b <= 198 then
    local raw, behind = take(sized(2 ^ (b - 196)))
    return hashes and hex_of(raw) or raw, behind
  end
  if b == 203 then return 'float', at + 9 end
  if b >= 204 and b <= 207 then
    local raw, behind = take(2 ^ (b - 204))
    return hashes and integer_text(raw, false) or number(raw), behind
  end
  if b >= 208 and b <= 211 then
    local size = 2 ^ (b - 208)
    local raw, behind = take(size)
    local text = integer_text(string.rep(raw:byte(1) >= 128 and '\255' or '\0', 8 - size) .. raw, true)
    return hashes and text or tonumber(text, 16) or text, behind
  end
  if b >= 217 and b <= 219 then return take(sized(2 ^ (b - 217))) end
  if b == 220 or b == 221 then
    local n = sized(b == 220 and 2 or 4)
    return many(data, at + 1, n, false, hashes)
  end
  if b == 222 or b == 223 then
    local n = sized(b == 222 and 2 or 4)
    return many(data, at + 1, n, true, hashes)
  end
  if b >= 224 then return hashes and '-' .. string.format('%x', 256 - b) or b - 256, at + 1 end
  error('not msgpack: byte ' .. b)
end

local function columns(...)
  local out = {...}
  for i, value in ipairs(out) do
    if type(value) == 'number' then value = string.format('%d', value) end
    out[i] = (tostring(value):gsub('[%c]', ' '))
  end
  return table.concat(out, '\t')
end

local lines = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local ok, message = pcall(function()
    if fields.body then return (decode(fields.body, 1)) end
    return cjson.decode(fields.json)
  end)
  if not ok then
    lines[#lines + 1] = columns('skip', entry[1])
  elseif fields.type == 'request.finished' then
    lines[#lines + 1] = columns('finished', entry[1], message.publisher, message.epoch, message.seq, message.request_id,
      (message.context or {}).session or '-', table.concat(message.chunk_hashes or {}, ' '))
  elseif fields.type == 'results' then
    for _, result in ipairs(message.results or {}) do
      local counts = result.counts or {}
      lines[#lines + 1] = columns('result', entry[1], result.command_id, message.worker, result.status,
        counts.requested or 0, counts.loaded or 0, counts.resident or 0, counts.evicted or 0, counts.missing or 0)
    end
  else
    lines[#lines + 1] = columns('skip', entry[1])
  end
end
return lines
