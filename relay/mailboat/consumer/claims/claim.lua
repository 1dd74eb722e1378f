-- Claims events. KEYS: one per event. ARGV: owner, repeated ('1' or '0', not needed here), lease in ms,
-- ttl in s, then nothing, or per key '1' for a replay, else '0'.
-- Answers per key, separated by commas: m<attempt>:<deaths> it is ours; w<ms> wait; d done; x dead.
local owner, lease, ttl = ARGV[1], tonumber(ARGV[3]), ARGV[4]
local instance, incarnation = string.match(owner, '^(.*):([^:]*)$')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ours = 'p|' .. owner .. '|' .. (now + lease) .. '|'
local first = ours .. '1'

-- The same container in a later life: the process that holds the claim is gone.
local function succeeds(holder)
  local former, life = string.match(holder, '^(.*):([^:]*)$')
  return former == instance and life < incarnation
end

-- Claims a key that exists.
local function claim(key, value, replay)
  local state, holder, at, tries, died
  if type(value) == 'string' then
    state, holder, at, tries, died = string.match(value, '^([pf])|([^|]*)|(%d+)|(%d+)|?(%d*)$')
    at, tries, died = tonumber(at), tonumber(tries), tonumber(died) or 0
  end
  local attempt, deaths = 1, 0
  if state == 'p' and holder == owner then -- the reply to an earlier claim was lost
    attempt, deaths = tries, died
  elseif state == 'p' and at > now and not succeeds(holder) then
    return 'w' .. (at - now)
  elseif state == 'p' then
    attempt, deaths = tries + 1, died + 1
  elseif state == 'f' and at > now then
    return 'w' .. (at - now)
  elseif state == 'f' then
    attempt, deaths = tries + 1, died
  elseif value ~= 'x' then -- 'd', and every value of an older helper
    return 'd'
  elseif not replay then
    return 'x'
  end
  redis.call('SET', key, ours .. attempt .. (deaths > 0 and '|' .. deaths or ''), 'EX', ttl)
  return 'm' .. attempt .. ':' .. deaths
end

local function refused(value)
  return type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true)
end

local answers = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('SET', key, first, 'NX', 'GET', 'EX', ttl) -- false: there was none, and the event is ours
  if refused(value) then -- a full server still answers which events are done
    local found = redis.pcall('GET', key)
    if not found or refused(found) then
      return value
    end
    value = found
  end
  answers[i] = value and claim(key, value, ARGV[4 + i] == '1') or 'm1:0'
end
return table.concat(answers, ',')
